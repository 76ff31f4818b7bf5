// The connections of this process over one network interface, and the thread that serves them.
//
// Messages have a group, a channel and a tag. On a connection, messages of one channel keep their order, and
// channels do not delay each other: a sender has at most `window_bytes` of a channel's messages
// that the receiver has not consumed, and the receiver buffers what has no posted receive. Posting
// never blocks. A small message is written by the thread that posts it, all others by the
// interface's thread; the same thread reads. While a thread waits for a result, it does the work of
// the interface's thread itself, which saves a switch of threads per result. Results are reported
// to the operation's owner.
//
// A connection may outlive its socket, if it was added so: when the socket is lost, operations wait until
// another one takes its place (resumable.h) or the connection is given up. What was sent but may not
// have arrived is kept: by reference while the owner keeps the memory, else as a copy.
//
// Locks: a connection's mutex guards its queues, and is not held during system calls, while a
// payload is sealed or opened, or while an owner runs. Memory of an operation is not accessed once `Nic::cancel` has returned.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../spin.h"
#include "arithmetic.h"
#include "cipher.h"
#include "frame.h"
#include "resumable.h"
#include "stream.h"

namespace wingbeat::net {

inline constexpr std::uint64_t window_bytes = 4U << 20;
// Consumed bytes after which a credit is sent without waiting for a message that carries it.
inline constexpr std::uint64_t credit_bytes = window_bytes / 4;
// Queued bytes up to which the posting thread writes.
inline constexpr std::uint64_t most_inline_bytes = 32U << 10;
inline constexpr std::size_t staging_bytes = 32U << 10;
// Groups of a connection whose end is remembered: what a peer has sent before it knew of the end is
// dropped, and a peer that uses the group later learns that it has ended.
inline constexpr std::size_t most_ended_groups = 1024;
// How the reason of operations begins whose connection has ended, other than by this process.
inline constexpr char connection_ended[] = "the connection was ";

class Nic;
class Connection;
struct Work;

// Reacts to finished operations. `progress` may be called by any thread, with no lock held.
class Owner {
 public:
  virtual ~Owner() = default;
  virtual void progress(Work& work) = 0;

  std::atomic<bool> troubled = false;  // whether one of its operations has failed
};

// Memory that is kept for the next request of the same size class. Thread-safe.
class ScratchPool {
 public:
  std::unique_ptr<std::uint8_t[]> acquire(std::size_t bytes);
  void release(std::unique_ptr<std::uint8_t[]> memory, std::size_t bytes);

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::unique_ptr<std::uint8_t[]>>> free_;
  std::size_t free_bytes_ = 0;
};

enum class State : std::uint8_t { pending, done, failed };

// One message, sent or received. Without `data`, a receive allocates `scratch` when it begins. With
// `sum`, the connection may add the message to these elements instead, and then sets `summed`.
struct Operation {
  std::uint8_t* data = nullptr;
  std::uint8_t* sum = nullptr;
  Dtype dtype = Dtype::float32;  // of `sum`
  bool summed = false;
  std::uint64_t bytes = 0;
  int peer = 0;
  std::uint64_t group = 0;
  std::uint16_t channel = 0;
  std::uint32_t tag = 0;
  std::shared_ptr<Owner> owner;
  std::uint64_t task = 0;  // of the owner
  // Of a send: whether its memory stays as it is after the end, until `release_sources`, or until
  // what replaces it proves that it has arrived.
  bool stays = false;
  std::unique_ptr<std::uint8_t[]> scratch;
  std::string error;  // set before `state` becomes failed
  std::atomic<State> state{State::pending};

  std::uint64_t moved = 0;  // bytes queued for sending, or received; guarded by the connection
};

using OperationPtr = std::shared_ptr<Operation>;

// Fails an operation for whose peer there is no connection.
void fail_unconnected(const OperationPtr& operation, Work& work);

// What a thread has to do once it holds no lock.
struct Work {
  std::vector<std::shared_ptr<Owner>> owners;
  std::vector<std::shared_ptr<Connection>> connections;

  void add(const std::shared_ptr<Owner>& owner);
  void add(const std::shared_ptr<Connection>& connection);
  // Runs owners and writes connections until nothing is left.
  void run();
};

// Of an encrypted connection: one key for each direction.
struct Keys {
  std::array<std::uint8_t, key_bytes> sending;
  std::array<std::uint8_t, key_bytes> receiving;
};

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Nic& nic, std::unique_ptr<Stream> stream, const std::optional<Keys>& keys,
             bool resumes);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void post_send(const OperationPtr& operation, Work& work);
  void post_receive(const OperationPtr& operation, Work& work);

  // Writes what is queued, or has the interface's thread write it.
  void flush(Work& work);
  // Writes until nothing is queued or the stream's buffer is full.
  void write(Work& work);
  // Reads what has arrived. Only the thread that serves the interface calls it.
  void read(Work& work);

  // Fails all operations; the first reason is kept.
  void fail(const std::string& reason, Work& work);
  // Removes the owner's operations. A send that is partly written fails its group at this end, and
  // that of the world the connection.
  void cancel(const Owner* owner, Work& work);
  // Fails all operations of a group on both ends, and everything that is posted in it later.
  void end_group(std::uint64_t group, bool failed, Work& work);
  // Sends what is queued, then the end of the stream; ends when the peer has done the same.
  void close_gracefully();

  // Continues over another socket, with other keys; false if the connection has failed or ends.
  bool resume(std::unique_ptr<Stream> stream, const std::optional<Keys>& keys, Work& work);
  // Fails a connection that has lost its socket, for the reason for which it was lost.
  void give_up(Work& work);
  // Copies what was sent from the memory of a task that has ended, and may have to be sent again.
  void release_sources(const Owner* owner, std::uint64_t task);

  struct Health {
    bool lost = false;  // whether it has no socket
    Stream::Progress progress;
  };
  // None if it has failed, ends, or does not resume.
  std::optional<Health> health();
  bool resumes() const { return resumes_; }

  Stream& stream() { return *stream_; }
  bool ended() const { return ended_stream_; }

  // Closes the child's copy of the stream, which must not be written to any more.
  void forget_after_fork() {
    ended_stream_ = true;
    stream_->close();
  }
  bool usable();

 private:
  struct Message {  // that arrived before its receive was posted; the last one may be incomplete
    std::uint32_t tag = 0;
    std::uint64_t total = 0;
    std::uint64_t received = 0;
    std::uint64_t credited = 0;  // bytes of it that count as consumed
    std::unique_ptr<std::uint8_t[]> data;
    std::uint64_t capacity = 0;
    OperationPtr operation;  // posted while a frame of the message was being received

    void reserve(std::uint64_t bytes);
  };

  enum class Into : std::uint8_t { nothing, operation, buffer, dropped };

  using ChannelKey = std::pair<std::uint64_t, std::uint16_t>;  // group and number

  struct Channel {
    ChannelKey key;
    // Sending.
    std::deque<OperationPtr> queue;
    std::uint64_t sent = 0;
    std::uint64_t consumed_by_peer = 0;
    bool ready = false;  // whether it is in `ready_`
    // Receiving. The message in progress goes into `operation`, the last of `early`, or nowhere.
    std::deque<OperationPtr> posted;
    std::deque<Message> early;
    std::uint64_t early_bytes = 0;
    Into into = Into::nothing;
    OperationPtr operation;
    std::uint32_t tag = 0;
    std::uint64_t total = 0;
    std::uint64_t offset = 0;
    std::uint64_t received = 0;
    std::uint64_t consumed = 0;
    std::uint64_t announced = 0;
    bool credit_due = false;
  };

  struct OutgoingFrame {
    std::uint8_t header[frame_header_bytes];
    std::size_t header_left = frame_header_bytes;
    const std::uint8_t* payload = nullptr;
    std::size_t payload_left = 0;
    OperationPtr operation;  // null: no payload, or one whose owner may release its memory
    bool last = false;
    std::uint64_t number = 0;  // as in SentFrames; 0: not counted
    const std::uint8_t* source = nullptr;  // of the payload before it was sealed
    std::size_t length = 0;
    std::unique_ptr<std::uint8_t[]> copy;  // what `source` is in, if the operation does not have it
    // Of an encrypted connection: what is sent as the payload in place of header and payload.
    std::unique_ptr<std::uint8_t[]> sealed;
    std::size_t sealed_bytes = 0;
  };

  struct Ended {
    bool here = false;
    bool announced = false;  // to the peer
    bool by_peer = false;
  };

  struct GroupEnd {
    std::uint64_t group;
    bool failed;
  };

  Channel& channel(std::uint64_t group, std::uint16_t number);
  void make_ready(Channel& channel);
  void fill_frames();
  void push_frame(Channel& channel, const FrameHeader& header, const OperationPtr& operation);
  void seal(OutgoingFrame& frame);
  void mark_sent(std::size_t bytes, Work& work);
  bool has_to_write() const {
    return !frames_.empty() || !ready_.empty() || !credits_.empty() || !ends_.empty() ||
           acknowledges_ || replays_;
  }
  void detach(OutgoingFrame& frame);
  void recycle(OutgoingFrame& frame);
  void rewind(OutgoingFrame& frame);
  void replay();
  void lose(std::unique_lock<std::mutex>& lock, const std::string& reason);
  const char* begin_counted(const FrameHeader& header, Work& work);
  void end_stream_if_drained();

  template <class Call>
  void read_unlocked(std::unique_lock<std::mutex>& lock, Call call);
  void await_rest();
  bool add_in_place(std::unique_lock<std::mutex>& lock, std::size_t& turn, Work& work);
  void compact_staging();
  const char* parse(std::unique_lock<std::mutex>& lock, Work& work);
  bool open_payload(std::unique_lock<std::mutex>& lock, const std::uint8_t* tag);
  std::size_t place(const std::uint8_t* from, std::size_t bytes);
  const char* begin_frame(const FrameHeader& header, Work& work);
  const char* begin_message(Channel& channel, const FrameHeader& header, Work& work);
  void drop_frame();
  void end_frame(Work& work);
  void deliver(Channel& channel, std::deque<Message>::iterator place,
               const OperationPtr& operation, Work& work);
  void make_way(Channel& channel, Work& work);
  void consume(Channel& channel, std::uint64_t bytes, Work& work);
  void prepare(const OperationPtr& operation);

  const char* why_ended(std::uint64_t group) const;
  Ended& record_end(std::uint64_t group, Work& work);
  const char* end_by_peer(const FrameHeader& header, Work& work);
  void fail_ended_groups(std::unique_lock<std::mutex>& lock, Work& work);
  void abandon_frames(std::uint64_t group, const std::string& reason, Work& work);
  Ended* abandon_group(std::unique_lock<std::mutex>& lock, std::uint64_t group,
                       const std::string& reason, Work& work);
  void fail_channel(Channel& channel, const std::string& reason, Work& work);
  void drop_channels(std::uint64_t group, const std::string& reason, Work& work);

  void fail_locked(std::unique_lock<std::mutex>& lock, const std::string& reason, Work& work);
  void wait_idle(std::unique_lock<std::mutex>& lock);
  void release_stream(std::unique_lock<std::mutex>& lock);

  Nic& nic_;
  const bool resumes_;
  std::unique_ptr<Stream> stream_;
  std::atomic<bool> ended_stream_ = false;
  // Null: not encrypted. Used by the writing and by the reading thread.
  std::optional<Cipher> sealer_, opener_;

  std::mutex mutex_;
  std::condition_variable idle_;
  std::map<ChannelKey, Channel> channels_;
  std::map<std::uint64_t, Ended> ended_;
  std::deque<std::uint64_t> ended_order_;  // the groups in `ended_`, oldest first
  bool failed_ = false;
  bool closing_ = false;
  bool end_sent_ = false;
  std::string reason_;
  std::string write_error_;

  // Of a connection that resumes.
  SentFrames<OutgoingFrame> sent_frames_;
  ReceivedFrames received_frames_;
  bool lost_ = false;  // the socket; `reason_` tells why
  std::uint64_t streams_ = 0;
  bool greeting_ = false;      // whether the other end has yet to tell what it has received
  bool replays_ = false;       // whether frames are to be sent again
  bool acknowledges_ = false;  // whether the other end is to be told

  // Sending. Only the thread that has set `writing_` uses frames.
  std::deque<Channel*> ready_;
  std::deque<Channel*> credits_;
  std::deque<GroupEnd> ends_;  // frames to send
  std::deque<OutgoingFrame> frames_;
  std::uint64_t queued_bytes_ = 0;
  bool writing_ = false;
  bool write_again_ = false;  // another thread was to write meanwhile
  bool blocked_ = false;

  // Receiving. `reading_` is set while bytes are read or opened without the lock.
  bool reading_ = false;
  std::unique_ptr<std::uint8_t[]> staging_;
  std::size_t staged_begin_ = 0, staged_end_ = 0;
  std::vector<GroupEnd> peer_ends_;  // whose operations have not been failed yet
  Channel* into_ = nullptr;         // the channel of the frame in progress; null: it has ended
  std::uint8_t* target_ = nullptr;  // null: the payload is dropped
  bool adding_ = false;             // whether the payload is added to `target_`
  std::size_t payload_left_ = 0;
  std::size_t frame_length_ = 0;
  bool tag_follows_ = false;  // the one of the payload
  std::size_t awaited_bytes_ = 1;  // before epoll reports the stream
};

class Nic : public std::enable_shared_from_this<Nic> {
 public:
  explicit Nic(const std::string& name);
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;
  ~Nic();

  // Starts the thread, which keeps this object until `close` or `stop`.
  void start();

  // Takes over a connected stream, in place of a former connection; encrypted if there are keys.
  // Throws std::runtime_error.
  // `resumes`: it outlives the stream; both ends have to agree.
  void add(int peer, std::unique_ptr<Stream> stream,
           const std::optional<Keys>& keys = std::nullopt, bool resumes = false);
  // As those of Connection; without effect if there is none.
  bool resume(int peer, std::unique_ptr<Stream> stream, const std::optional<Keys>& keys);
  void give_up(int peer);
  std::optional<Connection::Health> health(int peer);
  // Whether there is a connection that has not failed.
  bool connected(int peer);
  std::shared_ptr<Connection> connection(int peer);

  // Fails all operations with the reason and closes the connections.
  void fail(const std::string& reason);
  // Ends all connections after what is queued; waits up to `seconds` for the peers to do the same.
  void close(double seconds);
  // Ends the thread without waiting for it.
  void stop();
  // Closes this process's copies of the sockets; the thread does not exist here.
  void forget_after_fork();

  bool forked() const { return forked_; }
  // Does the work of the interface's thread until `ended` returns true or `seconds` have passed;
  // whether it is true. Returns at once if another thread does that work. What makes `ended` true
  // in another thread has to call `interrupt` afterwards.
  bool serve_until(const std::function<bool()>& ended, double seconds);
  void interrupt() {
    if (lent_ && !in_thread()) signal();
  }

  // Whether the calling thread serves the interface.
  bool in_thread() const { return std::this_thread::get_id() == server_; }
  // Has the thread write the connection.
  void wake(const std::shared_ptr<Connection>& connection);
  void await_writing(Connection& connection, bool awaited);
  void watch(Connection& connection);
  void unwatch(Connection& connection);
  void report_end();
  ScratchPool& scratch() { return scratch_; }

 private:
  void run();
  void turn(int milliseconds);
  void lend(bool to_waiting);
  void signal();
  std::vector<std::shared_ptr<Connection>> connections();

  int epoll_ = -1;  // of the connections and `event_`; waited for by the thread that serves
  int event_ = -1;
  int outer_ = -1;  // of `epoll_` unless a waiting thread serves; waited for by `run`
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::shared_ptr<Connection>> connections_;
  std::vector<std::shared_ptr<Connection>> replaced_;  // until the thread has seen their end
  std::vector<std::shared_ptr<Connection>> to_write_;
  bool stopping_ = false;
  bool running_ = false;
  bool forked_ = false;  // locks may be held by threads that do not exist in this process
  std::mutex serving_;             // held by the thread that serves
  std::atomic<bool> lent_ = false;  // whether that is a waiting thread
  std::atomic<std::thread::id> server_{};
  Spin spin_;                       // guarded by `serving_`
  ScratchPool scratch_;
};

}  // namespace wingbeat::net
