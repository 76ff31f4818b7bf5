#include "frame.h"

#include "../header.h"
#include "../layout.h"

namespace wingbeat::net {

namespace {

constexpr std::uint32_t magic = 0x74424e57;  // "WNBt"
constexpr std::size_t check_at = 56;

}  // namespace

void write_frame_header(const FrameHeader& header, std::uint8_t* out) {
  store(out, magic);
  store(out + 4, static_cast<std::uint8_t>(header.kind));
  store(out + 5, std::uint8_t{0});
  store(out + 6, header.channel);
  store(out + 8, header.tag);
  store(out + 12, header.length);
  store(out + 16, header.offset);
  store(out + 24, header.total);
  store(out + 32, header.consumed);
  store(out + 40, header.group);
  store(out + 48, header.received);
  store(out + check_at, messages::crc32(out, check_at));
}

const char* read_frame_header(const std::uint8_t* data, FrameHeader& header) {
  if (load<std::uint32_t>(data) != magic) return "a frame has a wrong magic number";
  if (load<std::uint32_t>(data + check_at) != messages::crc32(data, check_at)) {
    return "a frame header has a wrong checksum";
  }
  const auto kind = load<std::uint8_t>(data + 4);
  if (kind < static_cast<std::uint8_t>(Kind::data) || kind > static_cast<std::uint8_t>(Kind::resume)) {
    return "a frame has an unknown kind";
  }
  header.kind = static_cast<Kind>(kind);
  header.channel = load<std::uint16_t>(data + 6);
  header.tag = load<std::uint32_t>(data + 8);
  header.length = load<std::uint32_t>(data + 12);
  header.offset = load<std::uint64_t>(data + 16);
  header.total = load<std::uint64_t>(data + 24);
  header.consumed = load<std::uint64_t>(data + 32);
  header.group = load<std::uint64_t>(data + 40);
  header.received = load<std::uint64_t>(data + 48);
  if (header.length > most_frame_bytes) return "a frame is too long";
  if (header.total > most_message_bytes) return "a message is too long";
  if (header.offset > header.total || header.length > header.total - header.offset) {
    return "a frame exceeds its message";
  }
  if (header.kind == Kind::credit && header.total != 0) return "a credit has a payload";
  if (header.kind == Kind::resume && header.total != 0) return "a resume has a payload";
  if (header.kind == Kind::end) {
    if (header.total != 0) return "an end has a payload";
    if (header.group == 0) return "the world has no end";
  }
  if (header.kind == Kind::data && header.length == 0 && header.total != 0) {
    return "a frame of a message is empty";
  }
  return nullptr;
}

}  // namespace wingbeat::net
