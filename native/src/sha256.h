// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the handshake of connections.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace wingbeat {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::string_view data);

// The bytes of a digest.
inline std::string_view text(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

// Keys have at most 64 bytes.
Digest hmac_sha256(std::string_view key, std::string_view data);

// Compares in a time that does not depend on the contents.
bool same_digest(const Digest& a, const std::uint8_t* b);

}  // namespace wingbeat
