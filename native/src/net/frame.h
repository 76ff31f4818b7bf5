// The header of every frame on a connection; docs/developers/network.md lists the fields.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat::net {

enum class Kind : std::uint8_t { data = 1, credit, end, resume };

inline constexpr std::size_t frame_header_bytes = 60;
inline constexpr std::uint32_t most_frame_bytes = 256U << 10;
inline constexpr std::uint64_t most_message_bytes = std::uint64_t{1} << 40;

// A frame carries `length` bytes of a message of `total` bytes, from `offset` on. `consumed` is the
// number of bytes that the sender of this frame has received and consumed on the channel. Each group
// has channels of its own; group 0 is the world. An end is the last frame of a group: `tag` 0 if it
// was closed, 1 if it failed. `received` is the number of data and ends that the sender of this frame
// has received on the connection; a resume is the first frame over a further socket, and only tells it.
struct FrameHeader {
  Kind kind = Kind::data;
  std::uint16_t channel = 0;
  std::uint32_t tag = 0;
  std::uint32_t length = 0;
  std::uint64_t offset = 0;
  std::uint64_t total = 0;
  std::uint64_t consumed = 0;
  std::uint64_t group = 0;
  std::uint64_t received = 0;
};

// Writes frame_header_bytes bytes.
void write_frame_header(const FrameHeader& header, std::uint8_t* out);

// Reads frame_header_bytes bytes. Returns null, or the reason for which they are malformed.
const char* read_frame_header(const std::uint8_t* data, FrameHeader& header);

}  // namespace wingbeat::net
