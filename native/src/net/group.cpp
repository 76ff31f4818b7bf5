#include "group.h"

#include <utility>

namespace wingbeat::net {

Group::Group(std::shared_ptr<Nic> nic, std::uint64_t id, const std::vector<int>& ranks)
    : nic_(std::move(nic)), id_(id) {
  for (const int rank : ranks) connections_.push_back(nic_->connection(rank));
}

void Group::send(const OperationPtr& operation, Work& work) {
  operation->group = id_;
  const auto& to = connections_.at(static_cast<std::size_t>(operation->peer));
  to != nullptr ? to->post_send(operation, work) : fail_unconnected(operation, work);
}

void Group::receive(const OperationPtr& operation, Work& work) {
  operation->group = id_;
  const auto& from = connections_.at(static_cast<std::size_t>(operation->peer));
  from != nullptr ? from->post_receive(operation, work) : fail_unconnected(operation, work);
}

void Group::cancel(const Owner* owner, Work& work) {
  if (nic_->forked()) return;
  for (const auto& each : connections_) {
    if (each != nullptr) each->cancel(owner, work);
  }
}

void Group::release_sources(const Owner* owner, std::uint64_t task) {
  for (const auto& each : connections_) {
    if (each != nullptr && each->resumes()) each->release_sources(owner, task);
  }
}

void Group::end(bool failed, Work& work) {
  if (nic_->forked()) return;
  for (const auto& each : connections_) {
    if (each != nullptr) each->end_group(id_, failed, work);
  }
}

}  // namespace wingbeat::net
