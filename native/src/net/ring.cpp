#include "ring.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace wingbeat::net {

namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// Copied before the other side learns of it, so that both sides copy at the same time.
constexpr std::size_t piece_bytes = 64U << 10;
constexpr std::size_t states_bytes = 4096;
constexpr std::size_t memory_bytes = states_bytes + 2 * ring_bytes;
constexpr int seals = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

void ring_bell(int bell) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(bell, &one, sizeof one);
}

void wake(std::atomic<std::uint32_t>& sleeps, int bell) {
  if (sleeps.load() != 0 && sleeps.exchange(0) != 0) ring_bell(bell);
}

std::size_t place(std::uint64_t position) { return position & (ring_bytes - 1); }

// Bytes up to the end of a piece and of the ring.
std::size_t piece(std::uint64_t position, std::uint64_t published, std::size_t bytes) {
  const std::size_t left = piece_bytes - static_cast<std::size_t>(position - published);
  return std::min({bytes, left, ring_bytes - place(position)});
}

bool is_sealed(int fd) {
  const int found = ::fcntl(fd, F_GET_SEALS);
  return found >= 0 && (found & seals) == seals;
}

// A write to a pipe or a socket could block, or end this process by SIGPIPE. An eventfd is an
// anonymous inode, which has no type of a file.
bool is_doorbell(int fd) {
  struct stat found {};
  const int flags = ::fcntl(fd, F_GETFL);
  return ::fstat(fd, &found) == 0 && (found.st_mode & S_IFMT) == 0 && flags >= 0 &&
         (flags & O_NONBLOCK) != 0;
}

}  // namespace

// All accesses of `written`, `consumed` and the flags are sequentially consistent: a side that sets
// its flag either sees the position that the other side has stored, or is seen by it.

ssize_t RingWriter::write(const iovec* parts, std::size_t count) {
  std::size_t moved = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* from = static_cast<const std::uint8_t*>(parts[i].iov_base);
    for (std::size_t left = parts[i].iov_len; left > 0;) {
      if (written_ - consumed_ >= ring_bytes && !find_room()) {
        if (written_ - consumed_ > ring_bytes) return -EPROTO;
        return moved > 0 ? static_cast<ssize_t>(moved) : -EAGAIN;
      }
      const std::size_t room = ring_bytes - static_cast<std::size_t>(written_ - consumed_);
      const std::size_t bytes = piece(written_, published_, std::min(left, room));
      std::memcpy(data_ + place(written_), from, bytes);
      written_ += bytes;
      from += bytes;
      left -= bytes;
      moved += bytes;
      if (written_ - published_ == piece_bytes) publish();
    }
  }
  publish();
  return static_cast<ssize_t>(moved);
}

// Without room, the flag is set.
bool RingWriter::find_room() {
  publish();
  const auto used = [this] { return written_ - (consumed_ = state_.consumed.load()); };
  if (used() < ring_bytes) return true;
  state_.writer_sleeps.store(1);
  if (used() > ring_bytes / 2) return false;
  state_.writer_sleeps.store(0);
  return true;
}

void RingWriter::publish() {
  if (written_ == published_) return;
  published_ = written_;
  state_.written.store(written_);
  wake(state_.reader_sleeps, bell_);
}

ssize_t RingReader::read(const iovec* parts, std::size_t count) {
  std::size_t moved = 0;
  for (std::size_t i = 0; i < count; ++i) {
    auto* to = static_cast<std::uint8_t*>(parts[i].iov_base);
    for (std::size_t left = parts[i].iov_len; left > 0;) {
      if (written_ == consumed_ && !find_bytes()) {
        return moved > 0 ? static_cast<ssize_t>(moved) : -EAGAIN;
      }
      if (written_ - consumed_ > ring_bytes) return -EPROTO;
      const auto available = static_cast<std::size_t>(written_ - consumed_);
      const std::size_t bytes = piece(consumed_, published_, std::min(left, available));
      std::memcpy(to, data_ + place(consumed_), bytes);
      consumed_ += bytes;
      to += bytes;
      left -= bytes;
      moved += bytes;
      if (consumed_ - published_ == piece_bytes) publish();
    }
  }
  publish();
  return static_cast<ssize_t>(moved);
}

std::span<const std::uint8_t> RingReader::peek() {
  if (written_ == consumed_) written_ = state_.written.load();
  const std::uint64_t available = written_ - consumed_;
  if (available > ring_bytes) return {};
  return {data_ + place(consumed_), piece(consumed_, published_, available)};
}

void RingReader::consume(std::size_t bytes) {
  consumed_ += bytes;
  publish();
}

// Without bytes, the flag is set.
bool RingReader::find_bytes() {
  publish();
  if ((written_ = state_.written.load()) != consumed_) return true;
  state_.reader_sleeps.store(1);
  if ((written_ = state_.written.load()) == consumed_) return false;
  state_.reader_sleeps.store(0);
  return true;
}

void RingReader::publish() {
  if (consumed_ == published_) return;
  published_ = consumed_;
  state_.consumed.store(consumed_);
  if (written_ - consumed_ <= ring_bytes / 2) wake(state_.writer_sleeps, bell_);
}

// -- Memory -------------------------------------------------------------------------------------

Rings::Rings() : creator_(true) {
  // Not `memfd_create`, which older C libraries do not have.
  constexpr unsigned int close_on_exec = 1;
  constexpr unsigned int allow_sealing = 2;
  const auto memory = static_cast<int>(
      ::syscall(SYS_memfd_create, "wingbeat", close_on_exec | allow_sealing));
  if (memory < 0) fail("cannot create shared memory");
  // The doorbells have rung, so that each side looks into its ring first.
  descriptors_ = {memory, ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK),
                  ::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)};
  try {
    if (descriptors_[1] < 0 || descriptors_[2] < 0) fail("cannot create a doorbell");
    if (::ftruncate(memory, memory_bytes) != 0 || ::fcntl(memory, F_ADD_SEALS, seals) != 0) {
      fail("cannot create shared memory");
    }
    map();
  } catch (...) {
    close();
    throw;
  }
}

Rings::Rings(const std::vector<int>& descriptors) : descriptors_(descriptors), creator_(false) {
  try {
    struct stat found {};
    // Memory that can shrink would end this process when it is accessed.
    if (descriptors_.size() != rings_descriptors || ::fstat(descriptors_[0], &found) != 0 ||
        found.st_size != static_cast<off_t>(memory_bytes) || !is_sealed(descriptors_[0]) ||
        !is_doorbell(descriptors_[1]) || !is_doorbell(descriptors_[2])) {
      throw std::runtime_error("the peer sent no memory of a connection");
    }
    map();
  } catch (...) {
    close();
    throw;
  }
}

void Rings::map() {
  // All of it now: otherwise a ring with few messages grows for hours, as if something leaked.
  void* const found = ::mmap(nullptr, memory_bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_POPULATE, descriptors_[0], 0);
  if (found == MAP_FAILED) fail("cannot map shared memory");
  memory_ = static_cast<std::uint8_t*>(found);
}

void Rings::close_memory() {
  if (descriptors_[0] >= 0) ::close(std::exchange(descriptors_[0], -1));
}

void Rings::close() {
  for (int& each : descriptors_) {
    if (each >= 0) ::close(std::exchange(each, -1));
  }
  if (memory_ != nullptr) ::munmap(std::exchange(memory_, nullptr), memory_bytes);
}

RingState& Rings::state(bool outgoing) const {
  return reinterpret_cast<RingState*>(memory_)[outgoing == creator_ ? 0 : 1];
}

std::uint8_t* Rings::data(bool outgoing) const {
  return memory_ + states_bytes + (outgoing == creator_ ? 0 : ring_bytes);
}

// -- The stream ---------------------------------------------------------------------------------

RingStream::RingStream(int fd, std::shared_ptr<Rings> rings)
    : Stream(fd),
      rings_(std::move(rings)),
      writer_(rings_->state(true), rings_->data(true), rings_->bell(false)),
      reader_(rings_->state(false), rings_->data(false), rings_->bell(false)) {
  rings_->close_memory();
}

ssize_t RingStream::write(const iovec* parts, std::size_t count) {
  return writer_.write(parts, count);
}

ssize_t RingStream::read(const iovec* parts, std::size_t count) {
  const ssize_t got = reader_.read(parts, count);
  if (got != -EAGAIN) return got;
  std::uint8_t none = 0;
  const ssize_t end = ::recv(fd(), &none, 1, MSG_DONTWAIT);
  if (end > 0) return -EPROTO;
  if (end < 0) return -errno;
  const ssize_t last = reader_.read(parts, count);  // written before the end
  return last == -EAGAIN ? 0 : last;
}

void RingStream::watch(int epoll, void* data) {
  epoll_event event{};
  event.data.ptr = data;
  event.events = EPOLLRDHUP;
  const bool socket = ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd(), &event) == 0;
  // Edges are reported, so that nobody has to reset the doorbell; it is always writable.
  event.events = EPOLLIN | EPOLLOUT | std::uint32_t{EPOLLET};
  if (!socket || ::epoll_ctl(epoll, EPOLL_CTL_ADD, rings_->bell(true), &event) != 0) {
    fail("cannot watch a connection");
  }
}

void RingStream::unwatch(int epoll) {
  Stream::unwatch(epoll);
  ::epoll_ctl(epoll, EPOLL_CTL_DEL, rings_->bell(true), nullptr);
}

void RingStream::request_event() { ring_bell(rings_->bell(true)); }

void RingStream::close() {
  Stream::close();
  rings_->close();
}

}  // namespace wingbeat::net
