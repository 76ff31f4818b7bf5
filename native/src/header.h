// What stands before every message: one fixed layout, checked before a byte of it is used. Byte by
// byte it is in docs/developers/messages.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace wingbeat::messages {

// What a frame does in its flow.
enum class Type : std::uint8_t { hello = 1, welcome, data, acknowledge, missing, ask, leave };

inline constexpr std::uint8_t last_dtype = 7;

// A frame that no job of ours has sent; what() is the reason under which it is counted.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Span = std::pair<std::uint64_t, std::uint64_t>;

inline constexpr std::size_t header_fixed = 76;
inline constexpr std::size_t span_bytes = 16;
inline constexpr std::size_t most_spans = 255;

struct Header {
  Type type = Type::data;
  std::uint64_t session = 0;
  std::uint32_t sender = 0;
  std::uint32_t receiver = 0;
  std::uint64_t sequence = 0;
  std::uint64_t arrived = 0;
  std::uint64_t taken = 0;
  std::uint32_t kind = 0;
  std::array<std::uint32_t, 4> ids{};
  std::uint8_t dtype = 0;
  std::uint32_t length = 0;
  std::vector<Span> spans;  // no more than most_spans

  // Bytes with the ranges.
  std::size_t size() const { return header_fixed + span_bytes * spans.size(); }

  // Bytes with ranges and payload, which is what windows count.
  std::size_t frame_bytes() const { return size() + length; }

  bool operator==(const Header&) const = default;
};

// The number of ranges that follow the fixed part of a header, as its bytes say.
std::size_t spans_of(const std::uint8_t* data);

// Writes size() bytes.
void write_header(const Header& header, std::uint8_t* out);

// Reads the header that these bytes begin with. Throws Malformed.
Header read_header(const std::uint8_t* data, std::size_t nbytes);

// CRC-32 as zlib has it; `before` is that of the bytes before these.
std::uint32_t crc32(const std::uint8_t* data, std::size_t nbytes, std::uint32_t before = 0);

}  // namespace wingbeat::messages
