#include "endpoint.h"

#include <algorithm>
#include <utility>

namespace wingbeat::messages {

Endpoint::Endpoint(std::uint32_t number, std::uint64_t session, std::uint64_t window,
                   double silence)
    : number_(number), session_(session), window_(window), silence_(silence) {}

void Endpoint::add(const Route& route, std::uint64_t peer_session) {
  const Ends ends{session_, number_, peer_session, route.peer};
  links_.try_emplace(route, Link{Flow(ends, window_, silence_, released)});
}

void Endpoint::remove_peer(std::uint32_t peer) {
  for (auto it = links_.begin(); it != links_.end();) {
    if (it->first.peer == peer) {
      it->second.flow.abandon();
      it = links_.erase(it);
    } else {
      ++it;
    }
  }
  const auto of_peer = [&](const auto& each) { return each->route.peer == peer; };
  for (auto& inbox : inbox_) waiting_ -= std::erase_if(inbox, of_peer);
  std::erase_if(busy_, [&](const Route& each) { return each.peer == peer; });
  lost_.erase(peer);
  left_.erase(peer);
  ++changes;
}

void Endpoint::abandon() {
  for (auto& [route, link] : links_) link.flow.abandon();
}

void Endpoint::connected(const Route& route, bool introduce, double now) {
  const auto found = links_.find(route);
  if (found == links_.end()) return;
  Link& link = found->second;
  link.down = never;
  link.renewed = !introduce;
  link.flow.down();
  ++changes;
  if (!introduce) return;
  link.flow.hello(now);
  mark_busy(route, link);
  schedule(link, now);
}

void Endpoint::disconnected(const Route& route, double now) {
  const auto found = links_.find(route);
  if (found == links_.end()) return;
  Link& link = found->second;
  link.flow.down();
  if (link.down == never) link.down = now;
  ++changes;
}

bool Endpoint::post(const Route& route, const PostedPtr& message, double now) {
  Link& link = links_.at(route);
  if (message->header.type == Type::data &&
      link.flow.waiting_bytes() + message->size > link.flow.window()) {
    return false;
  }
  link.flow.post(message, now);
  mark_busy(route, link);
  schedule(link, now);
  return true;
}

Frame Endpoint::next(const Route& route, double now) {
  const auto found = links_.find(route);
  if (found == links_.end()) return {};
  Link& link = found->second;
  Frame frame = link.flow.next(now);
  if (frame.header != nullptr) link.flow.sent(frame, now);
  schedule(link, now);
  return frame;
}

std::vector<Route> Endpoint::take_busy() {
  for (const Route& route : busy_) links_.at(route).busy = false;
  return std::exchange(busy_, {});
}

void Endpoint::mark_busy(const Route& route, Link& link) {
  if (!link.busy && link.flow.up) {
    link.busy = true;
    busy_.push_back(route);
  }
}

void Endpoint::accept(const Route& route, Header header, std::unique_ptr<std::uint8_t[]> payload,
                      double now) {
  const auto found = links_.find(route);
  if (found == links_.end()) return;
  Link& link = found->second;
  Flow& flow = link.flow;
  if (!flow.names(header)) {
    ++refused[header.receiver == number_ && header.sender == route.peer ? "session" : "address"];
    return;
  }
  try {
    const bool renewed = header.type == Type::hello && std::exchange(link.renewed, false);
    if (lost_.erase(route.peer) > 0) ++changes;  // it was stopped or cut off, and has recovered
    if (flow.accept(header, now, renewed)) {
      if (header.type == Type::data) {
        inbox_[route.urgency].push_back(
            std::make_shared<Received>(Received{std::move(header), route, std::move(payload)}));
        ++waiting_;
      } else {
        flow.take(header.frame_bytes(), now);
        if (left_on_all(route.peer)) left_.insert(route.peer);
        ++changes;
      }
    }
  } catch (const Malformed& error) {
    ++refused[error.what()];
    return;
  }
  if (flow.pending(now)) mark_busy(route, link);
  schedule(link, now);
}

ReceivedPtr Endpoint::take(double now, const std::set<std::uint32_t>* of, bool keep) {
  for (auto& inbox : inbox_) {
    const auto found =
        of == nullptr ? inbox.begin()
                      : std::find_if(inbox.begin(), inbox.end(), [&](const ReceivedPtr& each) {
                          return of->contains(each->route.peer);
                        });
    if (found == inbox.end()) continue;
    ReceivedPtr message = std::move(*found);
    inbox.erase(found);
    --waiting_;
    message->kept = true;
    if (!keep) free(*message, now);
    return message;
  }
  return nullptr;
}

void Endpoint::free(Received& message, double now) {
  if (!std::exchange(message.kept, false)) return;
  const auto found = links_.find(message.route);
  if (found == links_.end()) return;  // its peer was removed
  Link& link = found->second;
  if (!link.flow.names(message.header)) return;  // of a former process of the peer
  link.flow.take(message.header.frame_bytes(), now);
  if (link.flow.pending(now)) mark_busy(message.route, link);
  schedule(link, now);
}

void Endpoint::tick(double now) {
  if (now < due_) return;
  due_ = never;
  for (auto& [route, link] : links_) {
    if (lost_.contains(route.peer)) continue;
    const bool has_left = left_.contains(route.peer);
    // A peer that has left still needs the acknowledgement of its last message.
    if (!has_left && link.flow.tick(now)) {
      lost_[route.peer] = {route.interface, link.flow.unarrived(), link.flow.waiting_bytes()};
      ++changes;
      continue;
    }
    if (link.flow.pending(now)) mark_busy(route, link);
    // Nothing is due for a peer that has left and disconnected.
    const double due = !has_left      ? link.flow.due(now)
                       : link.flow.up ? link.flow.tell_at(now)
                                      : never;
    due_ = std::min(due_, std::max(due, now));
  }
}

void Endpoint::resume(double now) {
  for (auto& [route, link] : links_) link.flow.resume(now);
}

void Endpoint::acknowledge(double now) {
  for (auto& [route, link] : links_) {
    if (link.flow.tell(now)) mark_busy(route, link);
  }
}

const Flow* Endpoint::flow(const Route& route) const {
  const auto found = links_.find(route);
  return found == links_.end() ? nullptr : &found->second.flow;
}

std::map<std::uint32_t, double> Endpoint::unconnected(double now) const {
  std::map<std::uint32_t, double> latest;
  for (const auto& [route, link] : links_) {
    double& down = latest.try_emplace(route.peer, link.down).first->second;
    down = std::max(down, link.down);
  }
  std::map<std::uint32_t, double> seconds;
  for (const auto& [peer, down] : latest) {
    if (down < never && !left_.contains(peer)) seconds[peer] = now - down;
  }
  return seconds;
}

const Route* Endpoint::unheard() const {
  for (const auto& [route, link] : links_) {
    if (!link.flow.met) return &route;
  }
  return nullptr;
}

bool Endpoint::unfinished(const Route& route) const {
  const Flow* found = flow(route);
  return found != nullptr && !lost_.contains(route.peer) && !found->empty() &&
         !(found->ended() && found->only_leave());
}

std::uint64_t Endpoint::repeated() const {
  std::uint64_t sum = 0;
  for (const auto& [route, link] : links_) sum += link.flow.repeated;
  return sum;
}

bool Endpoint::left_on_all(std::uint32_t peer) const {
  return std::all_of(links_.begin(), links_.end(), [&](const auto& each) {
    return each.first.peer != peer || each.second.flow.ended();
  });
}

}  // namespace wingbeat::messages
