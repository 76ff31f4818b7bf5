// Headers of both kinds of connections, and what a connection over several sockets remembers.
#include <deque>
#include <stdexcept>

#include "fuzz.h"
#include "header.h"
#include "layout.h"
#include "net/cipher.h"
#include "net/frame.h"
#include "net/resumable.h"

namespace fuzz {

namespace {

using namespace wingbeat;

// The header of a frame, whose checksum is made right if the input says so: no input would find it.
void read_frame(Input& input) {
  Bytes bytes = input.bytes(net::frame_header_bytes);
  const bool right = input.flag();
  bytes.resize(net::frame_header_bytes);
  if (right) {
    store(bytes.data(), std::uint32_t{0x74424e57});
    store(bytes.data() + 56, messages::crc32(bytes.data(), 56));
  }
  net::FrameHeader header;
  if (net::read_frame_header(bytes.data(), header) != nullptr) return;
  check(header.length <= net::most_frame_bytes && header.offset + header.length <= header.total,
        "a frame that is read is within its message");
  Bytes again(net::frame_header_bytes);
  net::write_frame_header(header, again.data());
  bytes[5] = 0;  // not used
  store(bytes.data() + 56, messages::crc32(bytes.data(), 56));
  check(again == bytes, "a header of a frame is written as it was read");
}

void read_message(Input& input) {
  const bool right = input.flag();
  Bytes bytes = input.bytes(messages::header_fixed + messages::span_bytes * messages::most_spans);
  if (right && bytes.size() >= messages::header_fixed) {
    std::memcpy(bytes.data(), "wgbt\1", 5);
    bytes.resize(messages::header_fixed + messages::span_bytes * (bytes[7] % 4));
    bytes[7] = static_cast<std::uint8_t>((bytes.size() - messages::header_fixed) / 16);
    const std::uint32_t before = messages::crc32(bytes.data(), 72);
    store(bytes.data() + 72, messages::crc32(bytes.data() + messages::header_fixed,
                                             bytes.size() - messages::header_fixed, before));
  }
  messages::Header header;
  try {
    header = messages::read_header(bytes.data(), bytes.size());
  } catch (const messages::Malformed&) {
    return;
  }
  Bytes again(header.size());
  messages::write_header(header, again.data());
  bytes.resize(header.size());
  check(again == bytes, "a header of a message is written as it was read");
}

struct Kept {
  std::uint64_t number;
};

// Both ends of a connection whose socket is lost again and again: every frame arrives once, in order.
void resume(Input& input) {
  net::SentFrames<Kept> sent;
  net::ReceivedFrames received;
  std::deque<Kept> unsent, on_the_way;
  std::uint64_t arrived = 0, posted = 0;
  const auto drop = [](const Kept&) {};
  for (int step = 0; step < 200 && !input.empty(); ++step) {
    switch (input.byte() % 5) {
      case 0:
        unsent.push_back({sent.next()});
        ++posted;
        break;
      case 1:
        if (unsent.empty()) break;
        on_the_way.push_back(unsent.front());
        if (!sent.received(unsent.front().number)) sent.keep(unsent.front());
        unsent.pop_front();
        break;
      case 2: {  // one frame arrives, or only its beginning
        if (on_the_way.empty() || received.in_progress()) break;
        const Kept frame = on_the_way.front();
        on_the_way.pop_front();
        const net::FrameHeader header{.length = 8, .offset = 8 * frame.number, .total = 1U << 20};
        check(received.begin(header) != net::ReceivedFrames::Begin::wrong, "the cut frame comes first");
        if (input.flag()) break;
        received.end();
        check(frame.number == ++arrived, "frames arrive once, in order");
        break;
      }
      case 3: {  // the socket is lost, and both ends continue
        received.cut();
        on_the_way.clear();
        check(sent.acknowledge(received.announce(), drop), "no more arrive than are sent");
        std::deque<Kept> again = sent.take();
        again.insert(again.end(), unsent.begin(), unsent.end());
        unsent = std::move(again);
        break;
      }
      default: {
        const std::uint64_t told = input.number();
        if (told <= arrived) check(sent.acknowledge(told, drop), "what has arrived is acknowledged");
        if (told > posted) check(!sent.acknowledge(told, drop), "more than was sent is refused");
      }
    }
  }
}

// A stranger's bytes never open, and what was sealed opens in its order only.
void open_sealed(Input& input) {
  if (!net::can_encrypt()) return;
  const Bytes key(net::key_bytes, 7);
  net::Cipher sealer(key.data()), opener(key.data());
  const Bytes plain = input.bytes(input.below(300));
  Bytes sealed(plain.size() + net::tag_bytes);
  const bool left_out = input.flag();
  if (left_out) sealer.skip();
  sealer.seal(plain.data(), plain.size(), sealed.data());
  const bool skipped = input.flag();
  if (skipped) opener.skip();
  const std::uint8_t change = input.byte();
  if (!sealed.empty()) sealed[input.below(sealed.size())] ^= change;
  Bytes opened = sealed;
  if (opener.open(opened.data(), plain.size(), opened.data() + plain.size())) {
    check(change == 0 && skipped == left_out, "what is changed or left out does not open");
    opened.resize(plain.size());
    check(opened == plain, "opened bytes are those that were sealed");
  }
}

}  // namespace

void run_headers(Input input) {
  switch (input.byte() % 4) {
    case 0: return read_frame(input);
    case 1: return read_message(input);
    case 2: return resume(input);
    default: return open_sealed(input);
  }
}

}  // namespace fuzz
