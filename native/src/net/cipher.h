// Authenticated encryption with the processor's AES instructions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "aegis.h"

namespace wingbeat::net {

// What this processor has the instructions for, the fastest first.
const std::vector<const Aegis*>& usable_aegis();

inline bool can_encrypt() { return !usable_aegis().empty(); }

// One direction of a connection. The nonce is the number of the piece (2^64 are never reached), so
// pieces open only in the order in which the other end's cipher has sealed them.
class Cipher {
 public:
  // `key` has key_bytes bytes and belongs to this direction alone. Throws std::runtime_error
  // without AES instructions.
  explicit Cipher(const std::uint8_t* key);

  // As those of Aegis, with the next nonce.
  void seal(const std::uint8_t* plain, std::size_t bytes, std::uint8_t* out);
  bool open(std::uint8_t* data, std::size_t bytes, const std::uint8_t* tag);
  // Passes over a piece that nothing uses.
  void skip() { ++number_; }

 private:
  std::array<std::uint8_t, nonce_bytes> next_nonce();

  std::array<std::uint8_t, key_bytes> key_;
  std::uint64_t number_ = 0;
};

}  // namespace wingbeat::net
