#include "nic.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <system_error>
#include <tuple>
#include <utility>

namespace wingbeat::net {

namespace {

// Bytes and frames of one system call, and bytes after which other connections are served.
constexpr std::size_t most_write_bytes = 1U << 20;
constexpr std::size_t most_write_frames = 16;
constexpr std::size_t most_turn_bytes = 4U << 20;
// A frame that a full window divides has at least this size.
constexpr std::uint64_t least_part_bytes = 64U << 10;
// Read after the rest of a payload: the next header, and small messages.
constexpr std::size_t read_ahead_bytes = 4U << 10;
// The rest of a frame is awaited as a whole if at least the first number of bytes is missing, and in
// parts of the second.
constexpr std::size_t least_awaited_bytes = 16U << 10;
constexpr std::size_t most_awaited_bytes = 128U << 10;
// Of a peer: channels, and messages of a channel before their receives are posted.
constexpr std::uint16_t most_channels = 1024;
constexpr std::size_t most_group_channels = 4096;
constexpr std::size_t most_early_messages = 1U << 16;
constexpr std::uint64_t most_early_bytes = std::uint64_t{4} << 30;
constexpr std::size_t most_pool_bytes = 256U << 20;

constexpr std::size_t sealed_header_bytes = frame_header_bytes + tag_bytes;
const char* const wrong_tag = "an authentication tag is wrong: bytes were changed on their way";

bool is_resume(const std::uint8_t* header) {
  return header[4] == static_cast<std::uint8_t>(Kind::resume);
}

std::string describe(int error) { return std::generic_category().message(error); }

void mark_done(Operation& operation, Work& work) {
  operation.state.store(State::done, std::memory_order_release);
  work.add(operation.owner);
}

void mark_failed(Operation& operation, const std::string& reason, Work& work) {
  if (operation.state.load(std::memory_order_relaxed) != State::pending) return;
  operation.error = reason;
  operation.state.store(State::failed, std::memory_order_release);
  if (operation.owner != nullptr) operation.owner->troubled = true;
  work.add(operation.owner);
}

void mark_wrong_size(Operation& operation, std::uint64_t sent, Work& work) {
  mark_failed(operation,
              "sent " + std::to_string(sent) + " bytes where " + std::to_string(operation.bytes) +
                  " were expected",
              work);
}

}  // namespace

void fail_unconnected(const OperationPtr& operation, Work& work) {
  mark_failed(*operation, "there is no connection to it", work);
}

std::unique_ptr<std::uint8_t[]> ScratchPool::acquire(std::size_t bytes) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 64));
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[size];
    if (!free.empty()) {
      auto memory = std::move(free.back());
      free.pop_back();
      free_bytes_ -= size;
      return memory;
    }
  }
  return std::make_unique_for_overwrite<std::uint8_t[]>(size);
}

void ScratchPool::release(std::unique_ptr<std::uint8_t[]> memory, std::size_t bytes) {
  const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 64));
  const std::lock_guard lock(mutex_);
  if (free_bytes_ + size > most_pool_bytes) return;
  free_bytes_ += size;
  free_[size].push_back(std::move(memory));
}

void Work::add(const std::shared_ptr<Owner>& owner) {
  if (owner != nullptr && std::find(owners.begin(), owners.end(), owner) == owners.end()) {
    owners.push_back(owner);
  }
}

void Work::add(const std::shared_ptr<Connection>& connection) {
  if (std::find(connections.begin(), connections.end(), connection) == connections.end()) {
    connections.push_back(connection);
  }
}

void Work::run() {
  while (true) {
    if (!owners.empty()) {
      const auto owner = std::move(owners.back());
      owners.pop_back();
      owner->progress(*this);
    } else if (!connections.empty()) {
      const auto connection = std::move(connections.back());
      connections.pop_back();
      connection->flush(*this);
    } else {
      return;
    }
  }
}

Connection::Connection(Nic& nic, std::unique_ptr<Stream> stream,
                       const std::optional<Keys>& keys, bool resumes)
    : nic_(nic),
      resumes_(resumes),
      stream_(std::move(stream)),
      staging_(std::make_unique_for_overwrite<std::uint8_t[]>(staging_bytes)) {
  if (!keys) return;
  sealer_.emplace(keys->sending.data());
  opener_.emplace(keys->receiving.data());
}

// -- Operations ---------------------------------------------------------------------------------

void Connection::post_send(const OperationPtr& operation, Work& work) {
  const std::lock_guard lock(mutex_);
  if (failed_ || closing_) {
    return mark_failed(*operation, failed_ ? reason_ : "the link is closed", work);
  }
  if (const char* why = why_ended(operation->group)) return mark_failed(*operation, why, work);
  Channel& into = channel(operation->group, operation->channel);
  into.queue.push_back(operation);
  queued_bytes_ += operation->bytes;
  make_ready(into);
  work.add(shared_from_this());
}

void Connection::post_receive(const OperationPtr& operation, Work& work) {
  const std::lock_guard lock(mutex_);
  const char* const ended = why_ended(operation->group);
  if (ended != nullptr && !channels_.contains({operation->group, operation->channel})) {
    return mark_failed(*operation, ended, work);
  }
  Channel& from = channel(operation->group, operation->channel);
  const auto found = std::find_if(from.early.begin(), from.early.end(), [&](const Message& each) {
    return each.tag == operation->tag && each.operation == nullptr;
  });
  if (found == from.early.end()) {
    // What has arrived completely before the end is delivered all the same.
    if (failed_) return mark_failed(*operation, reason_, work);
    if (ended != nullptr) return mark_failed(*operation, ended, work);
    from.posted.push_back(operation);
    make_way(from, work);
  } else if (into_ == &from && from.into == Into::buffer && &*found == &from.early.back()) {
    found->operation = operation;  // the reading thread delivers it after the frame
  } else {
    deliver(from, found, operation, work);
  }
}

// Hands over what has arrived of an early message, and receives the rest of it directly.
void Connection::deliver(Channel& from, std::deque<Message>::iterator place,
                         const OperationPtr& operation, Work& work) {
  const Message& message = *place;
  const bool in_progress = from.into == Into::buffer && &message == &from.early.back();
  if (message.total != operation->bytes) {
    mark_wrong_size(*operation, message.total, work);
    if (in_progress) from.into = Into::dropped;
  } else {
    prepare(operation);
    if (message.received > 0) {
      std::memcpy(operation->data, message.data.get(), message.received);
    }
    if (in_progress) {
      from.into = Into::operation;
      from.operation = operation;
    } else {
      mark_done(*operation, work);
    }
  }
  const std::uint64_t uncredited = message.received - message.credited;
  from.early_bytes -= message.received;
  from.early.erase(place);
  consume(from, uncredited, work);
}

// A posted receive awaits a message that is still to come, perhaps behind those that fill the
// window: credits these, so that the sender can send it.
void Connection::make_way(Channel& from, Work& work) {
  for (auto message = from.early.rbegin(); message != from.early.rend(); ++message) {
    const std::uint64_t uncredited = message->received - message->credited;
    if (uncredited == 0 && message->total > 0) return;  // so are those before
    message->credited = message->received;
    consume(from, uncredited, work);
  }
}

void Connection::Message::reserve(std::uint64_t bytes) {
  if (bytes <= capacity && data != nullptr) return;
  const std::uint64_t larger = std::min(std::max(bytes, 2 * capacity), total);
  auto memory = std::make_unique_for_overwrite<std::uint8_t[]>(larger);
  if (received > 0) std::memcpy(memory.get(), data.get(), received);
  data = std::move(memory);
  capacity = larger;
}

void Connection::prepare(const OperationPtr& operation) {
  if (operation->data != nullptr || operation->bytes == 0) return;
  operation->scratch = nic_.scratch().acquire(operation->bytes);
  operation->data = operation->scratch.get();
}

Connection::Channel& Connection::channel(std::uint64_t group, std::uint16_t number) {
  const ChannelKey key{group, number};
  Channel& found = channels_[key];
  found.key = key;
  return found;
}

// -- Sending ------------------------------------------------------------------------------------

void Connection::make_ready(Channel& channel) {
  if (channel.ready || channel.queue.empty()) return;
  channel.ready = true;
  ready_.push_back(&channel);
}

void Connection::flush(Work& work) {
  bool small = false;
  {
    const std::lock_guard lock(mutex_);
    // Another thread that writes, or the stream's readiness, continues with what was added.
    if (failed_ || lost_ || writing_ || blocked_ || !has_to_write()) return;
    small = queued_bytes_ <= most_inline_bytes;
  }
  if (small || nic_.in_thread()) {
    write(work);
  } else {
    nic_.wake(shared_from_this());
  }
}

void Connection::write(Work& work) {
  std::unique_lock lock(mutex_);
  if (writing_) write_again_ = true;
  if (failed_ || writing_ || ended()) return;
  writing_ = true;
  bool blocked = false;
  std::size_t written = 0;
  while (!failed_ && write_error_.empty()) {
    fill_frames();
    // What may have arrived is not sent before the other end has told what has.
    std::size_t sendable = std::min(frames_.size(), most_write_frames);
    if (greeting_) sendable = !frames_.empty() && is_resume(frames_.front().header) ? 1 : 0;
    if (sendable == 0) break;
    write_again_ = false;
    lock.unlock();
    iovec parts[2 * most_write_frames];
    std::size_t count = 0;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < sendable; ++i) {
      OutgoingFrame& frame = frames_[i];
      if (sealer_ && frame.sealed == nullptr) seal(frame);
      if (frame.header_left > 0) {
        parts[count++] = {frame.header + frame_header_bytes - frame.header_left,
                          frame.header_left};
      }
      if (frame.payload_left > 0) {
        parts[count++] = {const_cast<std::uint8_t*>(frame.payload), frame.payload_left};
      }
      bytes += frame.header_left + frame.payload_left;
    }
    const ssize_t sent = stream_->write(parts, count);
    lock.lock();
    if (sent >= 0) {
      mark_sent(static_cast<std::size_t>(sent), work);
      written += static_cast<std::size_t>(sent);
      blocked = static_cast<std::size_t>(sent) < bytes && !write_again_;
    } else if (sent == -EAGAIN) {
      blocked = !write_again_;
    } else if (sent != -EINTR) {
      // What has arrived before is still read; then the stream ends.
      write_error_ = describe(static_cast<int>(-sent));
      stream_->end(SHUT_RDWR);
    }
    if (!blocked && written >= most_turn_bytes) {
      blocked = true;
      stream_->request_event();
    }
    if (blocked) break;
  }
  writing_ = false;
  idle_.notify_all();
  if (failed_) return;
  if (blocked != blocked_ && !ended()) {
    blocked_ = blocked;
    nic_.await_writing(*this, blocked);
  }
  end_stream_if_drained();
}

// Divides messages into frames, one channel after the other.
void Connection::fill_frames() {
  if (greeting_) return;
  if (replays_) replay();
  std::size_t bytes = 0;
  for (const OutgoingFrame& frame : frames_) bytes += frame.payload_left;
  while (frames_.size() < most_write_frames && bytes < most_write_bytes) {
    if (!ends_.empty()) {
      const GroupEnd end = ends_.front();
      ends_.pop_front();
      const FrameHeader header{.kind = Kind::end,
                               .tag = end.failed ? 1U : 0U,
                               .group = end.group,
                               .received = received_frames_.announce()};
      write_frame_header(header, frames_.emplace_back().header);
      frames_.back().number = sent_frames_.next();
      continue;
    }
    if (acknowledges_) {
      acknowledges_ = false;
      if (received_frames_.due()) push_frame(channel(0, 0), {.kind = Kind::credit}, nullptr);
      continue;
    }
    if (!credits_.empty()) {
      Channel& of = *credits_.front();
      credits_.pop_front();
      of.credit_due = false;
      if (of.consumed == of.announced) continue;
      push_frame(of, {.kind = Kind::credit}, nullptr);
      continue;
    }
    if (ready_.empty()) return;
    Channel& from = *ready_.front();
    ready_.pop_front();
    from.ready = false;
    const OperationPtr operation = from.queue.front();
    const std::uint64_t room = window_bytes - (from.sent - from.consumed_by_peer);
    std::uint64_t length =
        std::min<std::uint64_t>(operation->bytes - operation->moved, most_frame_bytes);
    if (length > room) {
      if (room < least_part_bytes) continue;  // ready again after a credit
      length = room - room % most_element_bytes;
    }
    push_frame(from,
               {.tag = operation->tag,
                .length = static_cast<std::uint32_t>(length),
                .offset = operation->moved,
                .total = operation->bytes},
               operation);
    bytes += length;
    make_ready(from);
  }
}

void Connection::push_frame(Channel& channel, const FrameHeader& header,
                            const OperationPtr& operation) {
  OutgoingFrame& frame = frames_.emplace_back();
  FrameHeader full = header;
  std::tie(full.group, full.channel) = channel.key;
  full.consumed = channel.announced = channel.consumed;
  full.received = received_frames_.announce();
  write_frame_header(full, frame.header);
  if (operation == nullptr) return;
  frame.number = sent_frames_.next();
  frame.source = frame.payload = operation->data + operation->moved;
  frame.length = frame.payload_left = header.length;
  frame.operation = operation;
  operation->moved += header.length;
  channel.sent += header.length;
  queued_bytes_ -= header.length;
  frame.last = operation->moved == operation->bytes;
  if (frame.last) channel.queue.pop_front();
}

void Connection::seal(OutgoingFrame& frame) {
  const std::size_t payload = frame.payload_left > 0 ? frame.payload_left + tag_bytes : 0;
  frame.sealed_bytes = sealed_header_bytes + payload;
  frame.sealed = nic_.scratch().acquire(frame.sealed_bytes);
  sealer_->seal(frame.header, frame_header_bytes, frame.sealed.get());
  if (payload > 0) {
    sealer_->seal(frame.payload, frame.payload_left, frame.sealed.get() + sealed_header_bytes);
  }
  frame.header_left = 0;
  frame.payload = frame.sealed.get();
  frame.payload_left = frame.sealed_bytes;
}

void Connection::mark_sent(std::size_t bytes, Work& work) {
  while (!frames_.empty()) {
    OutgoingFrame& frame = frames_.front();
    const std::size_t header = std::min(bytes, frame.header_left);
    frame.header_left -= header;
    bytes -= header;
    const std::size_t payload = std::min(bytes, frame.payload_left);
    frame.payload += payload;
    frame.payload_left -= payload;
    bytes -= payload;
    if (frame.header_left > 0 || frame.payload_left > 0) return;
    const OperationPtr ended = frame.last ? frame.operation : nullptr;
    frame.last = false;
    if (frame.sealed != nullptr) {
      nic_.scratch().release(std::move(frame.sealed), frame.sealed_bytes);
    }
    if (resumes_ && frame.number > 0 && !sent_frames_.received(frame.number)) {
      if (frame.operation != nullptr && !frame.operation->stays) detach(frame);
      sent_frames_.keep(std::move(frame));
    } else {
      recycle(frame);
    }
    if (ended != nullptr) mark_done(*ended, work);  // its owner may release its memory
    frames_.pop_front();
  }
}

void Connection::recycle(OutgoingFrame& frame) {
  if (frame.copy != nullptr) nic_.scratch().release(std::move(frame.copy), frame.length);
}

// The payload can be sent, or sent again, without the operation's memory: the peer may receive its
// message completely, so the bytes have to be the right ones.
void Connection::detach(OutgoingFrame& frame) {
  if (frame.operation == nullptr) return;
  if (frame.length > 0 && (resumes_ || frame.sealed == nullptr)) {
    frame.copy = nic_.scratch().acquire(frame.length);
    std::memcpy(frame.copy.get(), frame.source, frame.length);
    if (frame.sealed == nullptr) frame.payload = frame.copy.get() + (frame.payload - frame.source);
    frame.source = frame.copy.get();
  }
  frame.operation.reset();
  frame.last = false;
}

void Connection::release_sources(const Owner* owner, std::uint64_t task) {
  std::unique_lock lock(mutex_);
  const auto detach_all = [&](std::deque<OutgoingFrame>& frames) {
    for (OutgoingFrame& frame : frames) {
      const Operation* const of = frame.operation.get();
      if (of != nullptr && of->owner.get() == owner && of->task == task) detach(frame);
    }
  };
  if (streams_ > 0) {  // some may be on their way again
    wait_idle(lock);
    detach_all(frames_);
  }
  detach_all(sent_frames_.frames());
}

void Connection::close_gracefully() {
  const std::lock_guard lock(mutex_);
  closing_ = true;
  if (!writing_) end_stream_if_drained();
}

// -- Another socket -----------------------------------------------------------------------------

bool Connection::resume(std::unique_ptr<Stream> stream, const std::optional<Keys>& keys,
                        Work& work) {
  std::unique_lock lock(mutex_);
  wait_idle(lock);
  if (failed_ || closing_ || !resumes_) return false;
  if (!lost_) {
    nic_.unwatch(*this);
    stream_->end(SHUT_RDWR);
    stream_->close();
  }
  stream_ = std::move(stream);
  ++streams_;
  sealer_.reset();
  opener_.reset();
  if (keys) {
    sealer_.emplace(keys->sending.data());
    opener_.emplace(keys->receiving.data());
  }
  lost_ = blocked_ = replays_ = false;
  ended_stream_ = false;
  reason_.clear();
  write_error_.clear();

  // The frame in progress comes again, from its beginning.
  if (received_frames_.in_progress() && target_ != nullptr) {
    target_ -= frame_length_ - payload_left_;
  }
  received_frames_.cut();
  payload_left_ = 0;
  tag_follows_ = false;
  staged_begin_ = staged_end_ = 0;
  awaited_bytes_ = 1;

  std::erase_if(frames_, [](const OutgoingFrame& frame) { return frame.number == 0; });
  for (OutgoingFrame& frame : frames_) rewind(frame);
  sent_frames_.put_back(frames_);
  for (auto& [key, each] : channels_) {  // credits may have been lost
    each.announced = 0;
    if (each.consumed == 0 || each.credit_due || why_ended(key.first) != nullptr) continue;
    each.credit_due = true;
    credits_.push_back(&each);
  }
  greeting_ = true;
  const FrameHeader header{.kind = Kind::resume, .received = received_frames_.announce()};
  write_frame_header(header, frames_.emplace_front().header);
  nic_.watch(*this);
  work.add(shared_from_this());
  return true;
}

// The frame is written from its beginning.
void Connection::rewind(OutgoingFrame& frame) {
  if (frame.sealed != nullptr) {
    nic_.scratch().release(std::move(frame.sealed), frame.sealed_bytes);
  }
  frame.header_left = frame_header_bytes;
  frame.payload = frame.source;
  frame.payload_left = frame.length;
}

// What the other end has not received comes before what was not sent, and behind this end's resume.
void Connection::replay() {
  replays_ = false;
  auto again = sent_frames_.take();
  for (OutgoingFrame& frame : again) rewind(frame);
  auto at = frames_.begin();
  if (at != frames_.end() && at->number == 0) ++at;
  frames_.insert(at, std::make_move_iterator(again.begin()), std::make_move_iterator(again.end()));
}

// The socket is lost; another one may take its place.
void Connection::lose(std::unique_lock<std::mutex>& lock, const std::string& reason) {
  const std::uint64_t of = streams_;
  wait_idle(lock);
  if (failed_ || lost_ || streams_ != of) return;
  lost_ = true;
  reason_ = reason;
  nic_.unwatch(*this);
  stream_->end(SHUT_RDWR);  // a forked process may have a copy of the socket
  stream_->close();
  ended_stream_ = true;
}

void Connection::give_up(Work& work) {
  std::unique_lock lock(mutex_);
  if (lost_) fail_locked(lock, std::string(reason_), work);
}

std::optional<Connection::Health> Connection::health() {
  const std::lock_guard lock(mutex_);
  if (failed_ || closing_ || !resumes_) return std::nullopt;
  return Health{lost_, lost_ ? Stream::Progress{} : stream_->progress()};
}

void Connection::end_stream_if_drained() {
  if (!closing_ || end_sent_ || has_to_write() || greeting_ || ended()) return;
  for (const auto& [number, each] : channels_) {
    if (!each.queue.empty()) return;  // it waits for a credit
  }
  end_sent_ = true;
  stream_->end(SHUT_WR);
}

// -- Receiving ----------------------------------------------------------------------------------

void Connection::read(Work& work) {
  std::unique_lock lock(mutex_);
  std::size_t turn = 0;
  while (true) {
    if (failed_) return release_stream(lock);
    if (lost_) return;
    if (add_in_place(lock, turn, work)) continue;
    compact_staging();
    iovec parts[2];
    std::size_t count = 0;
    std::size_t direct = 0;
    std::size_t ahead = staging_bytes - staged_end_;
    if (payload_left_ > 0 && target_ != nullptr && !adding_) {
      direct = payload_left_;
      parts[count++] = {target_, direct};
      ahead = std::min(ahead, read_ahead_bytes);
    }
    parts[count++] = {staging_.get() + staged_end_, ahead};
    ssize_t got = 0;
    read_unlocked(lock, [&] { got = stream_->read(parts, count); });
    if (failed_) continue;
    if (got == -EINTR) continue;
    if (got == -EAGAIN) return await_rest();
    if (got <= 0) {
      const std::string error = got < 0 ? describe(static_cast<int>(-got)) : write_error_;
      const std::string how = error.empty() ? "closed by the peer" : "lost: " + error;
      const bool expected = got == 0 && closing_;
      if (resumes_ && !closing_) {
        lose(lock, connection_ended + how);
        continue;
      }
      fail_locked(lock, expected ? "the link is closed" : connection_ended + how, work);
      continue;
    }
    const auto bytes = static_cast<std::size_t>(got);
    const std::size_t placed = std::min(bytes, direct);
    if (placed > 0) {
      target_ += placed;
      payload_left_ -= placed;
      if (payload_left_ == 0 && !opener_) end_frame(work);
    }
    staged_end_ += bytes - placed;
    if (const char* why = parse(lock, work)) {
      fail_locked(lock, std::string("the peer sent malformed data: ") + why, work);
      continue;
    }
    if (!peer_ends_.empty()) fail_ended_groups(lock, work);
    turn += bytes;
    if (bytes < direct + ahead) return await_rest();
    if (turn >= most_turn_bytes) {
      await_rest();
      return stream_->request_event();
    }
  }
}

// A part of a frame cannot be processed, so its arrival need not wake the thread.
void Connection::await_rest() {
  const std::size_t missing = payload_left_ + (tag_follows_ ? tag_bytes : 0);
  const std::size_t awaited =
      missing < least_awaited_bytes ? 1 : std::min(missing, most_awaited_bytes);
  if (awaited == awaited_bytes_) return;
  awaited_bytes_ = awaited;
  stream_->await_bytes(awaited);
}

// Adds bytes of the payload to their elements straight from the stream, if it has whole ones there.
bool Connection::add_in_place(std::unique_lock<std::mutex>& lock, std::size_t& turn, Work& work) {
  if (!adding_ || staged_begin_ != staged_end_) return false;
  const Dtype dtype = into_->operation->dtype;
  const auto ready = stream_->peek();
  const std::size_t elements = std::min(ready.size(), payload_left_) / size_of(dtype);
  if (elements == 0 || reinterpret_cast<std::uintptr_t>(ready.data()) % size_of(dtype) != 0) {
    return false;
  }
  read_unlocked(lock, [&] {
    add(dtype, target_, ready.data(), elements);
    stream_->consume(elements * size_of(dtype));
  });
  turn += elements * size_of(dtype);
  if (failed_) return true;
  target_ += elements * size_of(dtype);
  payload_left_ -= elements * size_of(dtype);
  if (payload_left_ == 0) end_frame(work);
  return true;
}

// Runs a call that uses the target, during which no other thread changes it.
template <class Call>
void Connection::read_unlocked(std::unique_lock<std::mutex>& lock, Call call) {
  reading_ = true;
  lock.unlock();
  call();
  lock.lock();
  reading_ = false;
  idle_.notify_all();
}

// What is left of the payload in progress is dropped.
void Connection::drop_frame() {
  into_ = nullptr;
  target_ = nullptr;
  adding_ = false;
}

void Connection::compact_staging() {
  if (staged_begin_ == 0) return;
  std::memmove(staging_.get(), staging_.get() + staged_begin_, staged_end_ - staged_begin_);
  staged_end_ -= staged_begin_;
  staged_begin_ = 0;
}

const char* Connection::parse(std::unique_lock<std::mutex>& lock, Work& work) {
  const std::size_t header_bytes = opener_ ? sealed_header_bytes : frame_header_bytes;
  while (!failed_) {
    if (received_frames_.in_progress() && payload_left_ == 0 && !tag_follows_) {
      received_frames_.end();
      if (resumes_ && received_frames_.due() && !acknowledges_) {
        acknowledges_ = true;
        work.add(shared_from_this());
      }
    }
    if (adding_ && staged_begin_ % most_element_bytes != 0) compact_staging();
    const std::size_t staged = staged_end_ - staged_begin_;
    std::uint8_t* const from = staging_.get() + staged_begin_;
    if (payload_left_ > 0) {
      const std::size_t bytes = place(from, std::min(staged, payload_left_));
      if (bytes == 0) return nullptr;
      payload_left_ -= bytes;
      staged_begin_ += bytes;
      if (payload_left_ == 0 && !opener_) end_frame(work);
      continue;
    }
    if (tag_follows_) {
      if (staged < tag_bytes) return nullptr;
      if (!open_payload(lock, from)) return wrong_tag;
      tag_follows_ = false;
      staged_begin_ += tag_bytes;
      if (!failed_) end_frame(work);
      continue;
    }
    if (staged < header_bytes) return nullptr;
    if (opener_ && !opener_->open(from, frame_header_bytes, from + frame_header_bytes)) {
      return wrong_tag;
    }
    FrameHeader header;
    if (const char* why = read_frame_header(from, header)) return why;
    staged_begin_ += header_bytes;
    if (const char* why = begin_counted(header, work)) return why;
    tag_follows_ = opener_ && payload_left_ > 0;
  }
  return nullptr;
}

bool Connection::open_payload(std::unique_lock<std::mutex>& lock, const std::uint8_t* tag) {
  if (target_ == nullptr) {  // dropped
    opener_->skip();
    return true;
  }
  std::uint8_t* const payload = target_ - frame_length_;
  bool opened = false;
  read_unlocked(lock, [&] { opened = opener_->open(payload, frame_length_, tag); });
  return opened;
}

// Places bytes of the payload; of a sum only whole elements. Returns how many.
std::size_t Connection::place(const std::uint8_t* from, std::size_t bytes) {
  if (target_ == nullptr) return bytes;
  if (adding_) {
    const Dtype dtype = into_->operation->dtype;
    bytes -= bytes % size_of(dtype);
    add(dtype, target_, from, bytes / size_of(dtype));
  } else {
    std::memcpy(target_, from, bytes);
  }
  target_ += bytes;
  return bytes;
}

const char* Connection::begin_counted(const FrameHeader& header, Work& work) {
  if (greeting_ != (header.kind == Kind::resume)) {
    return greeting_ ? "a further socket does not begin with a resume" : "a resume is not expected";
  }
  if (!sent_frames_.acknowledge(header.received, [this](auto& frame) { recycle(frame); })) {
    return "it has received more frames than were sent";
  }
  if (greeting_) {
    greeting_ = false;
    replays_ = true;
    work.add(shared_from_this());
    return nullptr;
  }
  if (header.kind == Kind::credit) return begin_frame(header, work);
  switch (received_frames_.begin(header)) {
    case ReceivedFrames::Begin::fresh:
      return begin_frame(header, work);
    case ReceivedFrames::Begin::again:
      payload_left_ = header.length;
      return nullptr;
    default:
      return "the frame that was cut does not come again";
  }
}

const char* Connection::begin_frame(const FrameHeader& header, Work& work) {
  if (header.channel >= most_channels) return "there is no such channel";
  if (header.group != 0) {
    if (header.kind == Kind::end) return end_by_peer(header, work);
    if (const auto found = ended_.find(header.group); found != ended_.end()) {
      if (found->second.by_peer) return "a frame follows the end of its group";
      // The peer has sent it before it knew of the end.
      frame_length_ = payload_left_ = header.length;
      return nullptr;
    }
    if (channels_.size() >= most_group_channels &&
        !channels_.contains({header.group, header.channel})) {
      return "too many channels are open";
    }
  }
  Channel& from = channel(header.group, header.channel);
  if (header.consumed > from.sent) return "it acknowledges more than was sent";
  if (header.consumed < from.consumed_by_peer) return "an acknowledgement decreased";
  if (header.consumed > from.consumed_by_peer) {
    from.consumed_by_peer = header.consumed;
    if (!from.ready && !from.queue.empty()) {
      make_ready(from);
      work.add(shared_from_this());
    }
  }
  if (header.kind == Kind::credit) return nullptr;
  if (from.received + header.length - from.consumed > window_bytes) {
    return "a channel exceeds its window";
  }
  if (from.early_bytes + header.length > most_early_bytes) {
    return "too many bytes are not received";
  }
  if (header.offset == 0) {
    if (const char* why = begin_message(from, header, work)) return why;
  } else if (from.into == Into::nothing || header.tag != from.tag || header.total != from.total ||
             header.offset != from.offset) {
    return "a frame does not continue its message";
  }
  from.received += header.length;
  into_ = &from;
  frame_length_ = payload_left_ = header.length;
  switch (from.into) {
    case Into::operation:
      adding_ = from.operation->summed;
      if (adding_ && header.length % size_of(from.operation->dtype) != 0) {
        return "a frame divides an element";
      }
      target_ = (adding_ ? from.operation->sum : from.operation->data) + header.offset;
      break;
    case Into::buffer:
      from.early.back().reserve(header.offset + header.length);
      target_ = from.early.back().data.get() + header.offset;
      break;
    default:
      target_ = nullptr;
  }
  if (header.length == 0) end_frame(work);
  return nullptr;
}

const char* Connection::begin_message(Channel& from, const FrameHeader& header, Work& work) {
  if (from.into != Into::nothing) return "a message begins within another one";
  from.tag = header.tag;
  from.total = header.total;
  from.offset = 0;
  const auto found = std::find_if(from.posted.begin(), from.posted.end(),
                                  [&](const auto& each) { return each->tag == header.tag; });
  if (found == from.posted.end()) {
    if (from.early.size() >= most_early_messages) return "too many messages are not received";
    Message& message = from.early.emplace_back();
    message.tag = header.tag;
    message.total = header.total;
    message.reserve(std::min<std::uint64_t>(header.total, window_bytes));
    from.into = Into::buffer;
    return nullptr;
  }
  const OperationPtr operation = *found;
  from.posted.erase(found);
  if (operation->bytes != header.total) {
    mark_wrong_size(*operation, header.total, work);
    from.into = Into::dropped;
    return nullptr;
  }
  operation->summed = operation->sum != nullptr && stream_->in_place();
  if (!operation->summed) prepare(operation);
  from.operation = operation;
  from.into = Into::operation;
  return nullptr;
}

void Connection::end_frame(Work& work) {
  if (into_ == nullptr) return;
  Channel& from = *into_;
  drop_frame();
  from.offset += frame_length_;
  const bool complete = from.offset == from.total;
  if (from.into == Into::buffer) {
    Message& message = from.early.back();
    message.received = from.offset;
    from.early_bytes += frame_length_;
    if (message.operation != nullptr) {
      const OperationPtr operation = std::move(message.operation);
      deliver(from, std::prev(from.early.end()), operation, work);
    } else if (!from.posted.empty()) {
      make_way(from, work);
    }
  } else {
    consume(from, frame_length_, work);
  }
  if (!complete) return;
  if (from.into == Into::operation) {
    mark_done(*from.operation, work);
    from.operation.reset();
  }
  from.into = Into::nothing;
}

void Connection::consume(Channel& channel, std::uint64_t bytes, Work& work) {
  channel.consumed += bytes;
  if (why_ended(channel.key.first) != nullptr) return;
  if (channel.credit_due || channel.consumed - channel.announced < credit_bytes) return;
  channel.credit_due = true;
  credits_.push_back(&channel);
  work.add(shared_from_this());
}

// -- The end ------------------------------------------------------------------------------------

void Connection::fail(const std::string& reason, Work& work) {
  std::unique_lock lock(mutex_);
  fail_locked(lock, reason, work);
}

void Connection::fail_locked(std::unique_lock<std::mutex>& lock, const std::string& reason,
                             Work& work) {
  if (failed_) return;
  failed_ = true;
  reason_ = reason;
  stream_->end(SHUT_RDWR);  // the interface's thread closes it
  wait_idle(lock);
  for (const OutgoingFrame& frame : frames_) {
    if (frame.operation != nullptr) mark_failed(*frame.operation, reason, work);
  }
  for (auto& [key, each] : channels_) fail_channel(each, reason, work);
  frames_.clear();
  sent_frames_.take();
  ready_.clear();
  credits_.clear();
  ends_.clear();
  drop_frame();
  payload_left_ = 0;
}

// Fails all operations; what has arrived completely is kept.
void Connection::fail_channel(Channel& channel, const std::string& reason, Work& work) {
  for (const auto& operation : channel.queue) {
    queued_bytes_ -= operation->bytes - operation->moved;
    mark_failed(*operation, reason, work);
  }
  for (const auto& operation : channel.posted) mark_failed(*operation, reason, work);
  if (channel.operation != nullptr) mark_failed(*channel.operation, reason, work);
  for (const auto& message : channel.early) {
    if (message.operation != nullptr) mark_failed(*message.operation, reason, work);
  }
  if (channel.into == Into::buffer) {  // incomplete
    channel.early_bytes -= channel.early.back().received;
    channel.early.pop_back();
  }
  channel.into = Into::nothing;
  channel.queue.clear();
  channel.posted.clear();
  channel.operation.reset();
  if (channel.ready) std::erase(ready_, &channel);
  if (channel.credit_due) std::erase(credits_, &channel);
  channel.ready = channel.credit_due = false;
}

// -- Ends of groups -----------------------------------------------------------------------------

const char* Connection::why_ended(std::uint64_t group) const {
  if (group == 0) return nullptr;
  const auto found = ended_.find(group);
  if (found == ended_.end()) return nullptr;
  return found->second.here ? "the group is closed" : "the peer has closed the group";
}

// The oldest record is removed if there are too many.
Connection::Ended& Connection::record_end(std::uint64_t group, Work& work) {
  const auto [found, added] = ended_.try_emplace(group);
  if (added) {
    ended_order_.push_back(group);
    if (ended_order_.size() > most_ended_groups) {
      drop_channels(ended_order_.front(), "the peer has closed the group", work);
      ended_.erase(ended_order_.front());
      ended_order_.pop_front();
    }
  }
  return found->second;
}

void Connection::end_group(std::uint64_t group, bool failed, Work& work) {
  std::unique_lock lock(mutex_);
  Ended* const end = abandon_group(lock, group, "the group is closed", work);
  if (end == nullptr || end->announced) return;
  end->announced = true;
  ends_.push_back({group, failed});
  work.add(shared_from_this());
}

// Fails what is posted, and drops what arrives. Returns null if the connection has failed.
Connection::Ended* Connection::abandon_group(std::unique_lock<std::mutex>& lock,
                                             std::uint64_t group, const std::string& reason,
                                             Work& work) {
  wait_idle(lock);
  if (failed_) return nullptr;
  Ended& end = record_end(group, work);
  if (!end.here) {
    end.here = true;
    abandon_frames(group, reason, work);
    drop_channels(group, reason, work);
  }
  return &end;
}

const char* Connection::end_by_peer(const FrameHeader& header, Work& work) {
  Ended& end = record_end(header.group, work);
  if (end.by_peer) return "a group ends twice";
  end.by_peer = true;
  if (!end.here) peer_ends_.push_back({header.group, header.tag != 0});
  return nullptr;
}

// What has arrived completely before the peer has closed a group can still be received.
void Connection::fail_ended_groups(std::unique_lock<std::mutex>& lock, Work& work) {
  wait_idle(lock);
  for (const auto& [group, failed] : std::exchange(peer_ends_, {})) {
    const std::string reason =
        failed ? "the group has failed at the peer" : "the peer has closed the group";
    abandon_frames(group, reason, work);
    if (failed) {
      drop_channels(group, reason, work);
      continue;
    }
    for (auto at = channels_.lower_bound({group, 0});
         at != channels_.end() && at->first.first == group; ++at) {
      fail_channel(at->second, reason, work);
    }
  }
}

// A frame that is queued is sent, but its memory is not accessed any more.
void Connection::abandon_frames(std::uint64_t group, const std::string& reason, Work& work) {
  for (OutgoingFrame& frame : frames_) {
    if (frame.operation == nullptr || frame.operation->group != group) continue;
    mark_failed(*frame.operation, reason, work);
    detach(frame);
  }
  for (OutgoingFrame& frame : sent_frames_.frames()) {
    if (frame.operation != nullptr && frame.operation->group == group) detach(frame);
  }
}

void Connection::drop_channels(std::uint64_t group, const std::string& reason, Work& work) {
  auto at = channels_.lower_bound({group, 0});
  while (at != channels_.end() && at->first.first == group) {
    fail_channel(at->second, reason, work);
    if (into_ == &at->second) drop_frame();
    at = channels_.erase(at);
  }
}

void Connection::wait_idle(std::unique_lock<std::mutex>& lock) {
  idle_.wait(lock, [this] { return !reading_ && !writing_; });
}

void Connection::release_stream(std::unique_lock<std::mutex>& lock) {
  wait_idle(lock);
  if (ended()) return;
  nic_.unwatch(*this);
  stream_->close();
  ended_stream_ = true;
  nic_.report_end();
}

void Connection::cancel(const Owner* owner, Work& work) {
  std::unique_lock lock(mutex_);
  wait_idle(lock);  // also after a failure, whose system calls may not have ended
  if (failed_) return;
  const auto owned = [&](const OperationPtr& each) {
    return each != nullptr && each->owner.get() == owner;
  };
  OperationPtr partly_sent;
  for (OutgoingFrame& each : frames_) {
    if (!owned(each.operation)) continue;
    if (each.operation->state.load(std::memory_order_relaxed) == State::pending) {
      partly_sent = each.operation;
    } else {
      detach(each);  // it is sent again
    }
  }
  for (OutgoingFrame& each : sent_frames_.frames()) {
    if (!owned(each.operation)) continue;
    if (each.operation->state.load(std::memory_order_relaxed) == State::pending) {
      partly_sent = each.operation;
    }
    detach(each);
  }
  for (auto& [key, each] : channels_) {
    for (const auto& operation : each.queue) {
      if (owned(operation) && operation->moved > 0) partly_sent = operation;
    }
  }
  if (partly_sent != nullptr) {
    const std::string reason = "a message was abandoned while it was sent";
    if (partly_sent->group == 0) return fail_locked(lock, reason, work);
    abandon_group(lock, partly_sent->group, reason, work);
    return;
  }
  for (auto& [key, each] : channels_) {
    std::erase_if(each.queue, [&](const auto& operation) {
      if (!owned(operation)) return false;
      queued_bytes_ -= operation->bytes;
      return true;
    });
    if (each.queue.empty() && each.ready) {
      each.ready = false;
      std::erase(ready_, &each);
    }
    std::erase_if(each.posted, owned);
    if (owned(each.operation)) {
      each.operation.reset();
      each.into = Into::dropped;
      if (into_ == &each) {
        target_ = nullptr;
        adding_ = false;
      }
    }
    for (auto& message : each.early) {
      if (owned(message.operation)) message.operation.reset();
    }
  }
}

bool Connection::usable() {
  const std::lock_guard lock(mutex_);
  return !failed_;
}

// -- The interface ------------------------------------------------------------------------------

Nic::Nic(const std::string& name) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  outer_ = ::epoll_create1(EPOLL_CLOEXEC);
  event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  if (epoll_ < 0 || outer_ < 0 || event_ < 0 ||
      ::epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &event) != 0 ||
      ::epoll_ctl(outer_, EPOLL_CTL_ADD, epoll_, &event) != 0) {
    const int error = errno;
    if (epoll_ >= 0) ::close(epoll_);
    if (outer_ >= 0) ::close(outer_);
    if (event_ >= 0) ::close(event_);
    throw std::system_error(error, std::generic_category(), "cannot serve interface " + name);
  }
}

Nic::~Nic() {
  if (epoll_ >= 0) ::close(epoll_);
  if (outer_ >= 0) ::close(outer_);
  if (event_ >= 0) ::close(event_);
}

void Nic::start() {
  running_ = true;
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Nic::add(int peer, std::unique_ptr<Stream> stream, const std::optional<Keys>& keys,
              bool resumes) {
  const auto made = std::make_shared<Connection>(*this, std::move(stream), keys, resumes);
  watch(*made);  // before a thread can find it and await writing
  std::shared_ptr<Connection> former;
  {
    const std::lock_guard lock(mutex_);
    former = std::exchange(connections_[peer], made);
    if (former != nullptr) replaced_.push_back(former);
  }
  if (former != nullptr) {
    Work work;
    former->fail("the peer has connected again", work);
    work.run();
  }
}

bool Nic::resume(int peer, std::unique_ptr<Stream> stream, const std::optional<Keys>& keys) {
  const auto found = connection(peer);
  if (found == nullptr) return false;
  Work work;
  const bool resumed = found->resume(std::move(stream), keys, work);
  work.run();
  return resumed;
}

void Nic::give_up(int peer) {
  Work work;
  if (const auto found = connection(peer)) found->give_up(work);
  work.run();
}

std::optional<Connection::Health> Nic::health(int peer) {
  const auto found = connection(peer);
  return found == nullptr ? std::nullopt : found->health();
}

bool Nic::connected(int peer) {
  const auto found = connection(peer);
  return found != nullptr && found->usable();
}

std::shared_ptr<Connection> Nic::connection(int peer) {
  const std::lock_guard lock(mutex_);
  const auto found = connections_.find(peer);
  return found == connections_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Connection>> Nic::connections() {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Connection>> all;
  for (const auto& [peer, each] : connections_) all.push_back(each);
  return all;
}

void Nic::fail(const std::string& reason) {
  if (forked_) return;
  Work work;
  for (const auto& each : connections()) each->fail(reason, work);
  work.run();
}

void Nic::close(double seconds) {
  if (forked_) return;
  const auto all = connections();
  for (const auto& each : all) each->close_gracefully();
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
      return !running_ ||
             std::all_of(all.begin(), all.end(), [](const auto& each) { return each->ended(); });
    });
  }
  fail("the link is closed");
  stop();
  if (in_thread()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !running_; });
}

void Nic::stop() {
  if (forked_) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  signal();
}

void Nic::signal() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
}

void Nic::wake(const std::shared_ptr<Connection>& connection) {
  {
    const std::lock_guard lock(mutex_);
    to_write_.push_back(connection);
    if (to_write_.size() > 1) return;  // signalled before, and not yet taken
  }
  signal();
}

void Nic::await_writing(Connection& connection, bool awaited) {
  connection.stream().await_writing(epoll_, &connection, awaited);
}

void Nic::watch(Connection& connection) { connection.stream().watch(epoll_, &connection); }

void Nic::unwatch(Connection& connection) { connection.stream().unwatch(epoll_); }

void Nic::report_end() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

// Waits for events and handles them. The caller holds `serving_`.
void Nic::turn(int milliseconds) {
  epoll_event events[64];
  const int count = ::epoll_wait(epoll_, events, 64, milliseconds);
  if (count <= 0) return;
  Work work;
  for (int i = 0; i < count; ++i) {
    auto* const connection = static_cast<Connection*>(events[i].data.ptr);
    if (connection == nullptr) {
      std::uint64_t value = 0;
      [[maybe_unused]] const ssize_t got = ::read(event_, &value, sizeof value);
      std::vector<std::shared_ptr<Connection>> ready;
      {
        const std::lock_guard lock(mutex_);
        ready.swap(to_write_);
      }
      for (const auto& each : ready) each->write(work);
      continue;
    }
    if (events[i].events & EPOLLOUT) connection->write(work);
    if (events[i].events & ~std::uint32_t{EPOLLOUT}) connection->read(work);
  }
  work.run();
  std::vector<std::shared_ptr<Connection>> released;  // after the lock
  const std::lock_guard lock(mutex_);
  const auto last = std::partition(replaced_.begin(), replaced_.end(),
                                   [](const auto& each) { return !each->ended(); });
  std::move(last, replaced_.end(), std::back_inserter(released));
  replaced_.erase(last, replaced_.end());
}

void Nic::run() {
  while (true) {
    epoll_event event;
    ::epoll_wait(outer_, &event, 1, -1);
    {
      const std::lock_guard serving(serving_);
      server_ = std::this_thread::get_id();
      turn(0);
      server_ = std::thread::id{};
    }
    const std::lock_guard lock(mutex_);
    if (stopping_) break;
  }
  const std::lock_guard lock(mutex_);
  running_ = false;
  changed_.notify_all();
}

bool Nic::serve_until(const std::function<bool()>& ended, double seconds) {
  using std::chrono::steady_clock;
  std::unique_lock serving(serving_, std::try_to_lock);
  if (!serving.owns_lock()) return false;
  server_ = std::this_thread::get_id();
  lend(true);
  const auto deadline = steady_clock::now() + std::chrono::duration<double>(seconds);
  bool has_ended = ended() || spin_.run([&] {
    turn(0);
    return ended();
  });
  while (!has_ended) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) break;
    turn(static_cast<int>(left.count()));
    has_ended = ended();
  }
  lend(false);
  server_ = std::thread::id{};
  serving.unlock();
  const std::lock_guard lock(mutex_);
  if (stopping_) signal();  // this thread may have taken the signal that was meant for `run`
  return has_ended;
}

// The interface's thread is not woken while the waiting thread serves.
void Nic::lend(bool to_waiting) {
  lent_ = to_waiting;
  epoll_event event{};
  event.events = to_waiting ? 0U : std::uint32_t{EPOLLIN};
  ::epoll_ctl(outer_, EPOLL_CTL_MOD, epoll_, &event);
}

void Nic::forget_after_fork() {
  forked_ = true;
  for (const auto& [peer, each] : connections_) each->forget_after_fork();
  for (const auto& each : replaced_) each->forget_after_fork();
  ::close(std::exchange(outer_, -1));
  ::close(std::exchange(epoll_, -1));
  ::close(std::exchange(event_, -1));
}

}  // namespace wingbeat::net
