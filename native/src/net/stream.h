// The bytes beneath a connection, in both directions, and how epoll reports that they can move.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace wingbeat::net {

// A connected socket. Derived streams carry their bytes otherwise, and the socket only ends them.
class Stream {
 public:
  // Takes over the socket. Throws std::system_error.
  explicit Stream(int fd);
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream();

  // Bytes moved, or -errno. Neither blocks; only one thread reads at a time, and one writes.
  virtual ssize_t write(const iovec* parts, std::size_t count);
  // 0: the peer has ended its direction. Less than requested: an event follows when there is more.
  virtual ssize_t read(const iovec* parts, std::size_t count);

  // Whether bytes can be read in place: `peek` returns some that stay until `consume`, or none, and
  // then `read` has to be called.
  virtual bool in_place() const { return false; }
  virtual std::span<const std::uint8_t> peek() { return {}; }
  virtual void consume(std::size_t) {}

  // Has epoll report `data`: EPOLLIN when there is something to read, EPOLLOUT after
  // `await_writing` when more can be written. Throws std::system_error.
  virtual void watch(int epoll, void* data);
  virtual void unwatch(int epoll);
  virtual void await_writing(int epoll, void* data, bool awaited);
  // Has EPOLLIN wait until so many bytes have arrived, or the stream ends.
  virtual void await_bytes(std::size_t bytes);
  // Called by a reader that stops although more has arrived.
  virtual void request_event() {}

  // What the other host has acknowledged of what was written.
  struct Progress {
    bool outstanding = false;             // whether it has not acknowledged everything that was sent
    std::uint64_t acknowledged = 0;       // bytes since the beginning
    std::uint32_t silent_milliseconds = 0;  // since its last acknowledgement of any kind
  };
  Progress progress() const;

  // As ::shutdown.
  void end(int how);
  bool open() const { return fd_ >= 0; }
  // Also in a forked process, where it leaves the stream of the other process as it is.
  virtual void close();

 protected:
  int fd() const { return fd_; }

 private:
  std::atomic<int> fd_;
};

}  // namespace wingbeat::net
