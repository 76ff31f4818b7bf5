// What both ends of a connection remember, so that it can continue over another socket: without I/O.
//
// Data and ends of groups are counted, in the order in which they are first sent; credits are not.
// Each frame tells how many of the other direction have arrived completely. After a socket is lost,
// both ends tell it again, and send what the other one has not received.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "frame.h"

namespace wingbeat::net {

// Counted frames that were written to a socket, until the other end has received them. `Frame` has a
// member `number`.
template <class Frame>
class SentFrames {
 public:
  // The number of the next frame, from 1.
  std::uint64_t next() { return ++numbered_; }

  bool received(std::uint64_t number) const { return number <= received_; }

  // Keeps a frame that was written and that the other end has not received.
  void keep(Frame frame) { frames_.push_back(std::move(frame)); }

  // The other end has received this many; calls `drop` with those that are no longer needed. Returns
  // false if there are not so many. A number that an earlier one exceeds has no effect.
  template <class Drop>
  bool acknowledge(std::uint64_t count, Drop drop) {
    if (count > numbered_) return false;
    if (count > received_) received_ = count;
    while (!frames_.empty() && received(frames_.front().number)) {
      drop(frames_.front());
      frames_.pop_front();
    }
    return true;
  }

  // Those to send again, in order. Each is kept again once it is written.
  std::deque<Frame> take() {
    if (!frames_.empty()) taken_ = frames_.back().number;
    return std::exchange(frames_, {});
  }

  // The socket was lost before all of those were written. They are at the front of `queue`, and the
  // other end may have received them over an earlier socket: its next number tells.
  void put_back(std::deque<Frame>& queue) {
    for (; !queue.empty() && queue.front().number <= taken_; queue.pop_front()) {
      keep(std::move(queue.front()));
    }
  }

  std::deque<Frame>& frames() { return frames_; }

 private:
  std::uint64_t numbered_ = 0;
  std::uint64_t received_ = 0;  // by the other end
  std::uint64_t taken_ = 0;     // the last that was sent again
  std::deque<Frame> frames_;
};

// Counts the frames that arrive. One that a lost socket has cut comes again from its beginning.
class ReceivedFrames {
 public:
  enum class Begin { fresh, again, wrong };

  // Of a counted frame. `again`: it is the one that was cut. `wrong`: that one is missing.
  Begin begin(const FrameHeader& header);
  // Whether a frame has begun and not been cut.
  bool in_progress() const { return begun_ && !cut_; }
  void end();
  // The socket is lost.
  void cut() { cut_ = begun_; }

  // The number to tell the other end, which then knows it.
  std::uint64_t announce();
  // Whether so much has arrived since that the other end should know it.
  bool due() const { return count_ - announced_ >= most_frames || bytes_ >= most_bytes; }

 private:
  static constexpr std::uint64_t most_frames = 256;
  static constexpr std::uint64_t most_bytes = 1U << 20;

  std::uint64_t count_ = 0, announced_ = 0;
  std::uint64_t bytes_ = 0;  // since the last announcement
  bool begun_ = false, cut_ = false;
  FrameHeader header_;
};

}  // namespace wingbeat::net
