// Counts the driver's checks; what those of connections share.
#pragma once

#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace checks {

using Bytes = std::vector<std::uint8_t>;

// What a connection uses.
enum class Medium { plain, shared_memory, encrypted };

inline std::atomic<long> count = 0;

inline void expect(bool holds, const std::string& what) {
  ++count;
  if (!holds) throw std::runtime_error(what);
}

inline std::array<int, 2> socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) != 0) {
    throw std::runtime_error("socketpair");
  }
  return ends;
}

}  // namespace checks
