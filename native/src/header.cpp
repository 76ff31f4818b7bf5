#include "header.h"

#include <algorithm>

#include "layout.h"

namespace wingbeat::messages {

namespace {

constexpr std::array<char, 4> magic{'w', 'g', 'b', 't'};
constexpr std::uint8_t version = 1;

// Where the fields begin.
constexpr std::size_t at_version = 4, at_type = 5, at_dtype = 6, at_spans = 7, at_session = 8,
                      at_sender = 16, at_receiver = 20, at_sequence = 24, at_arrived = 32,
                      at_taken = 40, at_kind = 48, at_ids = 52, at_length = 68, at_checksum = 72;

// Eight bytes at a time: each table is for a byte that has so many others behind it.
constexpr std::size_t stride = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, stride>;

constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ ((rest & 1U) != 0 ? 0xEDB88320U : 0U);
    tables[0][byte] = rest;
  }
  for (std::size_t behind = 1; behind < stride; ++behind) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[behind - 1][byte];
      tables[behind][byte] = (before >> 8) ^ tables[0][before & 0xFFU];
    }
  }
  return tables;
}

constexpr Tables tables = make_tables();

std::uint32_t checksum_of(const std::uint8_t* data, std::size_t spans) {
  const std::uint32_t before = crc32(data, at_checksum);
  return crc32(data + header_fixed, span_bytes * spans, before);
}

}  // namespace

std::uint32_t crc32(const std::uint8_t* data, std::size_t nbytes, std::uint32_t before) {
  std::uint32_t rest = ~before;
  for (; nbytes >= stride; data += stride, nbytes -= stride) {
    const std::uint64_t eight = load<std::uint64_t>(data) ^ rest;
    rest = 0;
    for (std::size_t place = 0; place < stride; ++place) {
      rest ^= tables[stride - 1 - place][(eight >> 8 * place) & 0xFFU];
    }
  }
  for (; nbytes > 0; ++data, --nbytes) rest = (rest >> 8) ^ tables[0][(rest ^ *data) & 0xFFU];
  return ~rest;
}

std::size_t spans_of(const std::uint8_t* data) { return data[at_spans]; }

void write_header(const Header& header, std::uint8_t* out) {
  std::copy(magic.begin(), magic.end(), out);
  out[at_version] = version;
  out[at_type] = static_cast<std::uint8_t>(header.type);
  out[at_dtype] = header.dtype;
  out[at_spans] = static_cast<std::uint8_t>(header.spans.size());
  store(out + at_session, header.session);
  store(out + at_sender, header.sender);
  store(out + at_receiver, header.receiver);
  store(out + at_sequence, header.sequence);
  store(out + at_arrived, header.arrived);
  store(out + at_taken, header.taken);
  store(out + at_kind, header.kind);
  store(out + at_ids, header.ids);
  store(out + at_length, header.length);
  std::uint8_t* range = out + header_fixed;
  for (const auto& [start, length] : header.spans) {
    store(range, start);
    store(range + 8, length);
    range += span_bytes;
  }
  store(out + at_checksum, checksum_of(out, header.spans.size()));
}

Header read_header(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes < header_fixed) throw Malformed("size");
  if (!std::equal(magic.begin(), magic.end(), data)) throw Malformed("magic");
  if (data[at_version] != version) throw Malformed("version");
  const std::size_t spans = data[at_spans];
  if (nbytes < header_fixed + span_bytes * spans) throw Malformed("size");
  if (load<std::uint32_t>(data + at_checksum) != checksum_of(data, spans)) {
    throw Malformed("checksum");
  }
  const auto type = static_cast<Type>(data[at_type]);
  if (type < Type::hello || type > Type::leave) throw Malformed("type");
  if (data[at_dtype] > last_dtype) throw Malformed("dtype");
  Header header;
  header.type = type;
  header.session = load<std::uint64_t>(data + at_session);
  header.sender = load<std::uint32_t>(data + at_sender);
  header.receiver = load<std::uint32_t>(data + at_receiver);
  header.sequence = load<std::uint64_t>(data + at_sequence);
  header.arrived = load<std::uint64_t>(data + at_arrived);
  header.taken = load<std::uint64_t>(data + at_taken);
  header.kind = load<std::uint32_t>(data + at_kind);
  header.ids = load<std::array<std::uint32_t, 4>>(data + at_ids);
  header.dtype = data[at_dtype];
  header.length = load<std::uint32_t>(data + at_length);
  header.spans.reserve(spans);
  for (std::size_t i = 0; i < spans; ++i) {
    const std::uint8_t* range = data + header_fixed + span_bytes * i;
    header.spans.emplace_back(load<std::uint64_t>(range), load<std::uint64_t>(range + 8));
  }
  return header;
}

}  // namespace wingbeat::messages
