#include "flow.h"

#include <algorithm>
#include <utility>

namespace wingbeat::messages {

Flow::Flow(const Ends& ends, std::uint64_t window, double silence,
           std::vector<PostedPtr>& released)
    : ends_(ends),
      window_(window),
      much_(std::min(tell_bytes, window / 8)),
      silence_(silence),
      released_(released) {}

bool Flow::only_leave() const {
  return std::all_of(held_.begin(), held_.end(),
                     [](const auto& each) { return each->header.type == Type::leave; });
}

bool Flow::names(const Header& header) const {
  return header.session == ends_.peer_session && header.sender == ends_.peer &&
         header.receiver == ends_.own;
}

void Flow::abandon() {
  for (PostedPtr& each : held_) released_.push_back(std::move(each));
  held_.clear();
  out_.under_way = 0;
  out_.under_way_bytes = 0;
}

void Flow::post(PostedPtr message, double now) {
  if (held_.empty()) out_.waiting_since = now;
  message->header.sequence = ++out_.last;
  out_.posted_bytes += message->size;
  held_.push_back(std::move(message));
}

void Flow::hello(double now) {
  up = unwelcome_ = true;
  out_.ask_at = now + out_.ask_after;
  answer(Type::hello, ++out_.hellos);
}

bool Flow::accept(const Header& header, double now, bool renewed) {
  if (header.type == Type::hello) {
    if (header.sequence <= into_.hellos) throw Malformed("replayed");
    into_.hellos = header.sequence;
  }
  heard_ = now;
  hear(header, now);
  switch (header.type) {
    case Type::data:
    case Type::leave:
      return accept_message(header, now);
    case Type::ask: {
      const bool complete = into_.arrived >= header.sequence;
      answer(complete ? Type::acknowledge : Type::missing);
      break;
    }
    case Type::missing:
      accept_missing(header.arrived, now);
      break;
    case Type::hello:
      answer(Type::welcome);
      greet(renewed, header.arrived, now);
      break;
    case Type::welcome:
      greet(std::exchange(unwelcome_, false), header.arrived, now);
      break;
    case Type::acknowledge:
      break;
  }
  return false;
}

// What a connection that is no more has lost is sent again; what is on its way on this one is not.
void Flow::greet(bool renewed, std::uint64_t arrived, double now) {
  met = up = true;
  out_.ask_after = ask_after_first;
  if (renewed) resend(arrived, now);
}

void Flow::take(std::uint64_t size, double now) {
  into_.taken_bytes += size;
  owe(now);
}

bool Flow::tell(double now) {
  if (into_.tell_at == never) return false;
  into_.tell_at = now;
  return true;
}

Frame Flow::next(double now) {
  if (!up) return {};
  if (answers_.empty() && may_send()) {
    const PostedPtr& message = held_[out_.under_way];
    address(message->header);
    return {&message->header, message};
  }
  if (answers_.empty() && into_.tell_at > now) return {};
  const Answer answer = answers_.empty() ? Answer{Type::acknowledge, 0} : answers_.front();
  answer_.type = answer.type;
  answer_.sequence = answer.sequence;
  address(answer_);
  return {&answer_, nullptr};
}

void Flow::sent(const Frame& frame, double now) {
  into_.told_arrived = into_.arrived_bytes;
  into_.told_taken = into_.taken_bytes;
  into_.tell_at = never;
  if (frame.message == nullptr) {
    if (!answers_.empty()) answers_.pop_front();
    return;
  }
  ++out_.under_way;
  out_.under_way_bytes += frame.message->size;
  out_.sent = std::max(out_.sent, frame.message->header.sequence);
  if (out_.ask_at == never) out_.ask_at = now + out_.ask_after;
}

double Flow::due(double now) const {
  return up ? std::min({tell_at(now), out_.ask_at, lost_at()}) : lost_at();
}

bool Flow::tick(double now) {
  if (now >= lost_at()) return true;
  if (up && now >= out_.ask_at) ask(now);
  return false;
}

// When a peer counts as lost from which nothing comes until then.
double Flow::lost_at() const {
  return empty() ? never : std::max(out_.waiting_since, heard_) + silence_;
}

// Queues a control frame. One that waits already says the same when it is sent: so what a peer that
// asks without end and reads nothing makes this end keep is bounded.
void Flow::answer(Type type, std::uint64_t sequence) {
  for (Answer& waiting : answers_) {
    if (waiting.type == type) {
      waiting.sequence = sequence;
      return;
    }
  }
  answers_.push_back({type, sequence});
}

// Asks what has arrived, or once more for a welcome: without one the peer may not know who asks.
void Flow::ask(double now) {
  out_.ask_after = std::min(2 * out_.ask_after, ask_after_latest);
  if (!met || unwelcome_) {
    hello(now);
  } else if (out_.under_way > 0) {
    out_.ask_at = now + out_.ask_after;
    answer(Type::ask, held_[out_.under_way - 1]->header.sequence);
  } else {
    out_.ask_at = never;
  }
}

bool Flow::accept_message(const Header& header, double now) {
  if (header.sequence <= into_.arrived) {
    ++repeated;
    into_.tell_at = now;  // the peer may not know
    return false;
  }
  if (header.sequence != into_.arrived + 1) {
    if (!std::exchange(into_.missed, true)) answer(Type::missing);
    return false;
  }
  const std::uint64_t size = header.frame_bytes();
  if (into_.arrived_bytes - into_.taken_bytes + size > window_) throw Malformed("window");
  ++into_.arrived;
  into_.missed = false;
  into_.arrived_bytes += size;
  into_.ended = into_.ended || header.type == Type::leave;
  owe(now);
  return true;
}

void Flow::accept_missing(std::uint64_t arrived, double now) {
  // What comes after it may still be on its way a second time.
  const bool just_resent = out_.resent_from == arrived && now < out_.resent_at + resend_after;
  if (!just_resent) resend(arrived, now);
}

void Flow::owe(double now) {
  const std::uint64_t untold = std::max(into_.arrived_bytes - into_.told_arrived,
                                        into_.taken_bytes - into_.told_taken);
  if (untold >= much_) {
    into_.tell_at = now;
  } else if (into_.tell_at == never) {
    into_.tell_at = now + tell_after;
  }
}

// Lets go of what has arrived at the peer.
void Flow::hear(const Header& header, double now) {
  if (header.arrived > out_.sent || header.taken > out_.posted_bytes) throw Malformed("sequence");
  out_.taken_bytes = std::max(out_.taken_bytes, header.taken);
  if (held_.empty() || held_.front()->header.sequence > header.arrived) return;
  while (!held_.empty() && held_.front()->header.sequence <= header.arrived) {
    PostedPtr message = std::move(held_.front());
    held_.pop_front();
    if (out_.under_way > 0) {  // otherwise it was to be sent once more
      --out_.under_way;
      out_.under_way_bytes -= message->size;
    }
    out_.arrived_bytes += message->size;
    message->arrived.store(true, std::memory_order_release);
    released_.push_back(std::move(message));
  }
  out_.waiting_since = now;
  out_.ask_after = ask_after_first;
  out_.ask_at = out_.under_way > 0 ? now + ask_after_first : never;
}

// Sends once more what comes after `arrived`.
void Flow::resend(std::uint64_t arrived, double now) {
  out_.resent_from = arrived;
  out_.resent_at = now;
  out_.under_way = 0;
  out_.under_way_bytes = 0;
}

void Flow::address(Header& header) const {
  header.session = ends_.session;
  header.sender = ends_.own;
  header.receiver = ends_.peer;
  header.arrived = into_.arrived;
  header.taken = into_.taken_bytes;
}

}  // namespace wingbeat::messages
