#include "stream.h"

#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

namespace wingbeat::net {

Stream::Stream(int fd) : fd_(fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot use a connection");
  }
}

Stream::~Stream() { Stream::close(); }

ssize_t Stream::write(const iovec* parts, std::size_t count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = count;
  const ssize_t sent = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  return sent >= 0 ? sent : -errno;
}

ssize_t Stream::read(const iovec* parts, std::size_t count) {
  const ssize_t got = ::readv(fd_, parts, static_cast<int>(count));
  return got >= 0 ? got : -errno;
}

void Stream::watch(int epoll, void* data) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = data;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, fd_, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot watch a connection");
  }
}

// Closing is not enough: a forked process may have a copy of the descriptor.
void Stream::unwatch(int epoll) { ::epoll_ctl(epoll, EPOLL_CTL_DEL, fd_, nullptr); }

void Stream::await_writing(int epoll, void* data, bool awaited) {
  epoll_event event{};
  event.events = EPOLLIN | (awaited ? std::uint32_t{EPOLLOUT} : 0U);
  event.data.ptr = data;
  ::epoll_ctl(epoll, EPOLL_CTL_MOD, fd_, &event);
}

Stream::Progress Stream::progress() const {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return {};
  return {info.tcpi_unacked > 0, info.tcpi_bytes_acked, info.tcpi_last_ack_recv};
}

// If the buffer is too small, the kernel enlarges it, or reports fewer bytes.
void Stream::await_bytes(std::size_t bytes) {
  const int least = static_cast<int>(bytes);
  ::setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
}

void Stream::end(int how) {
  if (fd_ >= 0) ::shutdown(fd_, how);
}

void Stream::close() {
  const int fd = fd_.exchange(-1);
  if (fd >= 0) ::close(fd);
}

}  // namespace wingbeat::net
