#include "frames.h"

#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "flow.h"
#include "header.h"

namespace naive {

namespace {

using namespace wingbeat::messages;
using Random = std::mt19937_64;
using Packed = std::vector<std::uint8_t>;

std::uint32_t slow_crc32(const std::uint8_t* data, std::size_t nbytes) {
  std::uint32_t rest = 0xFFFFFFFFU;
  for (std::size_t i = 0; i < 8 * nbytes; ++i) {
    if (i % 8 == 0) rest ^= data[i / 8];
    rest = (rest >> 1) ^ ((rest & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~rest;
}

Header any_header(Random& random) {
  Header header;
  header.type = static_cast<Type>(1 + random() % 7);
  header.session = random();
  header.sender = static_cast<std::uint32_t>(random());
  header.receiver = static_cast<std::uint32_t>(random());
  header.sequence = random();
  header.arrived = random();
  header.taken = random();
  header.kind = static_cast<std::uint32_t>(random());
  for (auto& id : header.ids) id = static_cast<std::uint32_t>(random());
  header.dtype = static_cast<std::uint8_t>(random() % (last_dtype + 1));
  header.length = static_cast<std::uint32_t>(random());
  const std::size_t spans = random() % 4 == 0 ? most_spans : random() % 4;
  for (std::size_t i = 0; i < spans; ++i) header.spans.emplace_back(random(), random());
  return header;
}

// Exactly its size, so that a sanitizer sees a step too far.
Packed pack(const Header& header) {
  Packed data(header.size());
  write_header(header, data.data());
  return data;
}

bool refused(const Packed& data) {
  try {
    read_header(data.data(), data.size());
  } catch (const Malformed&) {
    return true;
  }
  return false;
}

// Two ends of a flow; frames between them are lost, repeated and swapped by chance.
struct Wire {
  explicit Wire(unsigned seed) : random(seed) {}

  void carry(Flow& from, Flow& to, std::deque<Packed>& queue, double now, bool faults) {
    while (true) {
      const Frame frame = from.next(now);
      if (frame.header == nullptr) break;
      const int copies = !faults ? 1 : random() % 8 == 0 ? 0 : random() % 8 == 0 ? 2 : 1;
      for (int i = 0; i < copies; ++i) queue.push_back(pack(*frame.header));
      from.sent(frame, now);
    }
    while (!queue.empty()) {
      if (faults && queue.size() > 1 && random() % 8 == 0) std::swap(queue[0], queue[1]);
      const Packed data = std::move(queue.front());
      queue.pop_front();
      const Header header = read_header(data.data(), data.size());
      try {
        if (!to.names(header)) {
          ++strangers;
        } else if (to.accept(header, now, header.type == Type::hello)) {
          arrived.push_back(header.kind);
          to.take(header.frame_bytes(), now);
        }
      } catch (const Malformed&) {
        ++malformed;
      }
    }
  }

  Random random;
  std::vector<std::uint32_t> arrived;
  int strangers = 0, malformed = 0;
};

}  // namespace

std::string wrong_header(unsigned seed) {
  Random random(seed);
  const Header header = any_header(random);
  const Packed data = pack(header);
  if (!(read_header(data.data(), data.size()) == header)) return "what was written is read";
  Packed summed(data.begin(), data.begin() + 72);
  summed.insert(summed.end(), data.begin() + 76, data.end());
  if (crc32(summed.data(), summed.size()) != slow_crc32(summed.data(), summed.size())) {
    return "the checksum is CRC-32";
  }
  const Packed cut(data.begin(), data.begin() + static_cast<long>(random() % data.size()));
  if (!refused(cut)) return "one cut short is refused";
  Packed flipped = data;
  flipped[random() % data.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
  if (!refused(flipped)) return "one flipped bit is found";
  return "";
}

std::string wrong_flow(unsigned seed) {
  Wire wire(seed);
  std::deque<Packed> there, back;
  std::vector<PostedPtr> released;
  Flow a({11, 0, 22, 1}, 1U << 20, 1e9, released);
  Flow b({22, 1, 11, 0}, 1U << 20, 1e9, released);
  std::vector<PostedPtr> posted;
  a.hello(0);
  double now = 0;
  for (int step = 0; step < 400; ++step, now += 0.05) {
    if (step < 100) {  // more bytes in all than may be under way
      Header header;
      header.kind = static_cast<std::uint32_t>(step);
      header.length = static_cast<std::uint32_t>(wire.random() % 200000);
      posted.push_back(std::make_shared<Posted>(header, nullptr));
      a.post(posted.back(), now);
      if (wire.random() % 16 == 0) a.down(), a.hello(now);
    }
    const bool faults = step < 200;
    wire.carry(a, b, there, now, faults);
    wire.carry(b, a, back, now, faults);
    if (a.tick(now) || b.tick(now)) return "nobody is lost";
  }
  if (wire.strangers != 0) return "frames name their ends";
  if (wire.arrived.size() != 100) return "each message arrives once";
  for (std::uint32_t i = 0; i < 100; ++i) {
    if (wire.arrived[i] != i) return "messages arrive in order";
    if (!posted[i]->arrived) return "the sender hears what has arrived";
  }
  if (released.size() != 100) return "what has arrived is released";
  if (!a.empty() || a.waiting_bytes() != 0) return "the window is free in the end";
  if (b.pending(now) || b.due(now) < now) return "nothing is due in the end";
  return "";
}

}  // namespace naive
