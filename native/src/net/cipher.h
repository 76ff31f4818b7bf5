// Authenticated encryption with the processor's AES instructions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace wingbeat::net {

inline constexpr std::size_t key_bytes = 16;
inline constexpr std::size_t nonce_bytes = 16;
inline constexpr std::size_t tag_bytes = 16;

// AEGIS-128L (draft-irtf-cfrg-aegis-aead) without associated data, with tags of 128 bits. A nonce
// must not be used twice with a key.
namespace aegis {

// Whether this processor has the instructions.
bool supported();

// Writes the ciphertext, then its tag: `bytes` + tag_bytes. `out` does not overlap `plain`.
void seal(const std::uint8_t* key, const std::uint8_t* nonce, const std::uint8_t* plain,
          std::size_t bytes, std::uint8_t* out);

// Decrypts in place. With a wrong tag it returns false and the data are zeros.
bool open(const std::uint8_t* key, const std::uint8_t* nonce, std::uint8_t* data,
          std::size_t bytes, const std::uint8_t* tag);

}  // namespace aegis

// One direction of a connection. The nonce is the number of the piece (2^64 are never reached), so
// pieces open only in the order in which the other end's cipher has sealed them.
class Cipher {
 public:
  // `key` has key_bytes bytes and belongs to this direction alone. Throws std::runtime_error
  // without AES instructions.
  explicit Cipher(const std::uint8_t* key);

  // As aegis::seal and aegis::open, with the next nonce.
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
