// One flow: messages to and from one peer, over one interface, in one class. No Python, no sockets;
// time is given.
//
// What is posted is kept until the peer says that it has arrived, so what a broken connection has
// lost is sent again, and what comes twice is dropped by its number. A flow counts bytes too: what
// was posted and not yet taken by the peer's user never exceeds the window. All times are seconds
// of one clock.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#include "header.h"

namespace wingbeat::messages {

inline constexpr double never = std::numeric_limits<double>::infinity();

// How long what has arrived may wait for a message that takes the news along.
inline constexpr double tell_after = 0.005;
// Bytes from which the news travels by itself, at once.
inline constexpr std::uint64_t tell_bytes = 2U << 20;
// Bytes that are handed to the network at a time: more would lie in its queues, and no longer in
// the processors' caches when they are sent and taken in. Enough for 10 Gbit/s and 6 ms.
inline constexpr std::uint64_t most_under_way = 8U << 20;
// Messages of any size of which that is true: a carrier bounds what it queues by the number of
// frames. Enough for 80,000 messages a second and 20 ms.
inline constexpr std::size_t most_messages_under_way = 2048;
// How long a sender waits for an answer before it asks what has arrived: at first, and at most.
inline constexpr double ask_after_first = 0.2, ask_after_latest = 2.0;
// How long what was sent again is not sent yet again: an answer needs time.
inline constexpr double resend_after = 0.05;

// A message that was posted; its payload must not change until it has arrived.
struct Posted {
  Posted(Header of, const std::uint8_t* from)
      : header(std::move(of)), payload(from), size(header.frame_bytes()) {}
  Posted(const Posted&) = delete;
  Posted& operator=(const Posted&) = delete;
  virtual ~Posted() = default;

  // Releases the memory of the payload.
  virtual void release() {}

  Header header;
  const std::uint8_t* payload;
  std::uint64_t size;
  std::atomic<bool> arrived = false;  // any thread reads it
  int queued = 0;                     // times that a carrier still has to send it
};

using PostedPtr = std::shared_ptr<Posted>;

// Who speaks with whom: numbers in the job, and the random numbers that both drew at their start.
struct Ends {
  std::uint64_t session;
  std::uint32_t own;
  std::uint64_t peer_session;
  std::uint32_t peer;
};

// What is to be sent next: its header, and the message if it is one. Both are the flow's.
struct Frame {
  const Header* header = nullptr;
  PostedPtr message;
};

class Flow {
 public:
  // Messages that have arrived are moved to `released`: the owner of their payloads lets go of them.
  Flow(const Ends& ends, std::uint64_t window, double silence, std::vector<PostedPtr>& released);

  // Whether the peer has been heard; whether frames can be handed over now; what came twice.
  bool met = false;
  bool up = false;
  std::uint64_t repeated = 0;

  std::uint64_t window() const { return window_; }
  // Bytes posted that the peer has not taken. What it has not confirmed as arrived is kept here, and
  // cannot have been taken.
  std::uint64_t waiting_bytes() const {
    return out_.posted_bytes - std::min(out_.taken_bytes, out_.arrived_bytes);
  }
  // Messages that have not arrived; whether there are none, or none but the last word.
  std::size_t unarrived() const { return held_.size(); }
  bool empty() const { return held_.empty(); }
  bool only_leave() const;
  // Whether the peer's last word has arrived.
  bool ended() const { return into_.ended; }
  // When what has arrived is to be told, unless that is `pending`.
  double tell_at(double now) const { return into_.tell_at > now ? into_.tell_at : never; }

  // Whether a header names these two ends.
  bool names(const Header& header) const;

  // Releases all messages, arrived or not.
  void abandon();

  // Queues a message; the caller has looked whether there is room.
  void post(PostedPtr message, double now);

  // Introduces this end to the peer, at first and after the connection was made anew.
  void hello(double now);

  // Takes in a frame that is known to be of this flow; true if it is the next message. Throws
  // Malformed: it speaks of what was never sent, exceeds the window, or is an old hello. `renewed`:
  // it came on another connection than what came before.
  bool accept(const Header& header, double now, bool renewed = false);

  // Notes that the user has taken a message of so many bytes.
  void take(std::uint64_t size, double now);

  // Has `next` tell at once what has arrived, if the peer does not know; whether it does not.
  bool tell(double now);

  // The frame that is to be sent first, if there is one. `sent` notes that it was handed over, and
  // with it what has arrived; `down` that nothing can be handed over now: it stays where it is.
  Frame next(double now);
  void sent(const Frame& frame, double now);
  void down() { up = false; }

  // Whether `next` returns something.
  bool pending(double now) const {
    return up && (!answers_.empty() || may_send() || into_.tell_at <= now);
  }
  // When `tick` or `next` has something to do, if nothing arrives before. What is pending does not
  // count: a connection that is blocked cannot send it.
  double due(double now) const;
  // Lets time pass; true if the peer has been silent for too long.
  bool tick(double now);
  // Begins to count the peer's silence anew: this process was stopped, and heard nobody meanwhile.
  void resume(double now) { heard_ = std::max(heard_, now); }

 private:
  struct Answer {
    Type type;
    std::uint64_t sequence;
  };

  // The way out. Of the messages held, the first `under_way` have been handed over.
  struct Sending {
    std::uint64_t last = 0;
    std::uint64_t sent = 0;
    std::uint64_t posted_bytes = 0;
    std::uint64_t arrived_bytes = 0;
    std::uint64_t taken_bytes = 0;
    std::size_t under_way = 0;
    std::uint64_t under_way_bytes = 0;
    double waiting_since = never;
    double ask_at = never;
    double ask_after = ask_after_first;
    std::uint64_t hellos = 0;
    double resent_at = -never;
    std::uint64_t resent_from = 0;
  };

  // The way in: what has arrived, what was taken, and how much of that the peer knows.
  struct Receiving {
    std::uint64_t arrived = 0;
    std::uint64_t arrived_bytes = 0;
    std::uint64_t taken_bytes = 0;
    std::uint64_t told_arrived = 0;
    std::uint64_t told_taken = 0;
    double tell_at = never;
    bool missed = false;  // whether a gap after `arrived` was reported
    std::uint64_t hellos = 0;
    bool ended = false;
  };

  bool may_send() const {
    return out_.under_way < std::min(held_.size(), most_messages_under_way) &&
           out_.under_way_bytes < most_under_way;
  }
  double lost_at() const;
  void answer(Type type, std::uint64_t sequence = 0);
  void ask(double now);
  bool accept_message(const Header& header, double now);
  void greet(bool renewed, std::uint64_t arrived, double now);
  void accept_missing(std::uint64_t arrived, double now);
  void owe(double now);
  void hear(const Header& header, double now);
  void resend(std::uint64_t arrived, double now);
  void address(Header& header) const;

  Ends ends_;
  bool unwelcome_ = false;  // whether the peer has not answered a hello
  std::uint64_t window_;
  std::uint64_t much_;
  double silence_;
  double heard_ = -never;
  Sending out_;
  Receiving into_;
  std::vector<PostedPtr>& released_;
  std::deque<PostedPtr> held_;
  std::deque<Answer> answers_;  // one of each type at most
  Header answer_;
};

}  // namespace wingbeat::messages
