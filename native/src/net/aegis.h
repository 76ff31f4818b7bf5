// AEGIS-128X2 (draft-irtf-cfrg-aegis-aead) without associated data, with tags of 128 bits, in one
// implementation for each set of instructions. All produce the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat::net {

inline constexpr std::size_t key_bytes = 16;
inline constexpr std::size_t nonce_bytes = 16;
inline constexpr std::size_t tag_bytes = 16;

// A nonce must not be used twice with a key.
struct Aegis {
  const char* name;

  // Writes the ciphertext, then its tag: `bytes` + tag_bytes. `out` does not overlap `plain`.
  void (*seal)(const std::uint8_t* key, const std::uint8_t* nonce, const std::uint8_t* plain,
               std::size_t bytes, std::uint8_t* out);

  // Decrypts in place. With a wrong tag it returns false and the data are zeros.
  bool (*open)(const std::uint8_t* key, const std::uint8_t* nonce, std::uint8_t* data,
               std::size_t bytes, const std::uint8_t* tag);
};

extern const Aegis aegis_with_aes, aegis_with_vaes;

}  // namespace wingbeat::net
