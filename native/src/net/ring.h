// Bytes between two processes of one host, through memory that they share.
//
// Each direction is a ring with one writer and one reader. A side that waits sets a flag, looks
// again, and only then sleeps; the other side rings a doorbell, an eventfd, if the flag is set.
// A process keeps its own positions in private memory and checks those of the other process, so
// that nothing the other one stores leads to an access outside of the ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stream.h"

namespace wingbeat::net {

inline constexpr std::size_t ring_bytes = 1U << 20;  // a power of two
inline constexpr std::size_t rings_descriptors = 3;  // memory, doorbells

// What both processes see of a ring. Each field has a cache line of its own.
struct RingState {
  alignas(64) std::atomic<std::uint64_t> written;   // bytes since the beginning
  alignas(64) std::atomic<std::uint64_t> consumed;  // likewise
  alignas(64) std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint32_t> writer_sleeps;
};

// One end of a ring; `bell` wakes the other one.
class RingWriter {
 public:
  RingWriter(RingState& state, std::uint8_t* data, int bell)
      : state_(state), data_(data), bell_(bell) {}

  // As Stream::write. Less than all: the bell of this side rings when half of the ring is free.
  ssize_t write(const iovec* parts, std::size_t count);

 private:
  bool find_room();
  void publish();

  RingState& state_;
  std::uint8_t* const data_;
  const int bell_;
  std::uint64_t written_ = 0, published_ = 0;
  std::uint64_t consumed_ = 0;  // as last seen
};

class RingReader {
 public:
  RingReader(RingState& state, const std::uint8_t* data, int bell)
      : state_(state), data_(data), bell_(bell) {}

  // As Stream::read, without an end: -EAGAIN if the ring is empty. Less than requested: the bell of
  // this side rings when there is more.
  ssize_t read(const iovec* parts, std::size_t count);
  // As those of Stream.
  std::span<const std::uint8_t> peek();
  void consume(std::size_t bytes);

 private:
  bool find_bytes();
  void publish();

  RingState& state_;
  const std::uint8_t* const data_;
  const int bell_;
  std::uint64_t consumed_ = 0, published_ = 0;
  std::uint64_t written_ = 0;  // as last seen
};

// The memory of both directions, and the doorbell of each process. One process creates them, and
// passes the descriptors to the other one.
class Rings : public std::enable_shared_from_this<Rings> {
 public:
  // Throws std::system_error.
  Rings();
  // Takes over the descriptors of the process that created them. Throws std::runtime_error.
  explicit Rings(const std::vector<int>& descriptors);
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;
  ~Rings() { close(); }

  // For the other process: memory and doorbells.
  const std::vector<int>& descriptors() const { return descriptors_; }
  // The memory is no longer needed by another process.
  void close_memory();
  void close();

  RingState& state(bool outgoing) const;
  std::uint8_t* data(bool outgoing) const;
  int bell(bool own) const { return descriptors_[own == creator_ ? 1 : 2]; }

 private:
  void map();

  std::vector<int> descriptors_;
  const bool creator_;
  std::uint8_t* memory_ = nullptr;
};

// The socket, between the same two processes, carries nothing; its end is the end of the stream.
class RingStream : public Stream {
 public:
  RingStream(int fd, std::shared_ptr<Rings> rings);

  ssize_t write(const iovec* parts, std::size_t count) override;
  ssize_t read(const iovec* parts, std::size_t count) override;
  bool in_place() const override { return true; }
  std::span<const std::uint8_t> peek() override { return reader_.peek(); }
  void consume(std::size_t bytes) override { reader_.consume(bytes); }
  void watch(int epoll, void* data) override;
  void unwatch(int epoll) override;
  void await_writing(int, void*, bool) override {}  // the doorbell rings
  void await_bytes(std::size_t) override {}
  void request_event() override;
  void close() override;

 private:
  const std::shared_ptr<Rings> rings_;
  RingWriter writer_;
  RingReader reader_;
};

}  // namespace wingbeat::net
