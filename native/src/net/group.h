// The members of a group, and the connections of this process to them over one interface.
//
// Operations name a member by its index in the group. The connections are those that existed when
// the group was made: a member that connects again does not take part.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "nic.h"

namespace wingbeat::net {

class Group : public std::enable_shared_from_this<Group> {
 public:
  // `id` is the same on all members, and that of no other group; 0: the world.
  Group(std::shared_ptr<Nic> nic, std::uint64_t id, const std::vector<int>& ranks);

  void send(const OperationPtr& operation, Work& work);
  void receive(const OperationPtr& operation, Work& work);
  void cancel(const Owner* owner, Work& work);
  // As Connection::release_sources.
  void release_sources(const Owner* owner, std::uint64_t task);
  // Fails all operations, on all members. `failed`: what they have not received yet is dropped.
  void end(bool failed, Work& work);
  const std::shared_ptr<Nic>& nic() const { return nic_; }
  ScratchPool& scratch() { return nic_->scratch(); }

 private:
  const std::shared_ptr<Nic> nic_;
  const std::uint64_t id_;
  std::vector<std::shared_ptr<Connection>> connections_;  // by member; null: there is none
};

}  // namespace wingbeat::net
