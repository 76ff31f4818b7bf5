#include "ciphers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checks.h"
#include "net/cipher.h"

namespace ciphers {

namespace {

using checks::expect;
using namespace wingbeat::net;

using Bytes = std::vector<std::uint8_t>;

using Block = std::array<std::uint8_t, 16>;

std::uint8_t twice(std::uint8_t x) {
  return static_cast<std::uint8_t>((x << 1) ^ ((x & 0x80) != 0 ? 0x1b : 0));
}

std::uint8_t product(std::uint8_t a, std::uint8_t b) {
  std::uint8_t sum = 0;
  for (; b != 0; b >>= 1, a = twice(a)) {
    if ((b & 1) != 0) sum ^= a;
  }
  return sum;
}

// FIPS 197: the inverse in GF(2^8), which is the power 254, then the affine map.
std::uint8_t substitute(std::uint8_t x) {
  std::uint8_t inverse = 1;
  for (int i = 0; i < 254; ++i) inverse = product(inverse, x);
  std::uint8_t out = 0x63;
  for (int shift = 0; shift < 5; ++shift) {
    out ^= static_cast<std::uint8_t>((inverse << shift) | (inverse >> (8 - shift)));
  }
  return out;
}

Block xored(Block a, const Block& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] ^= b[i];
  return a;
}

Block both(Block a, const Block& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] &= b[i];
  return a;
}

Block round_of(const Block& block, const Block& key) {
  static const auto table = [] {
    std::array<std::uint8_t, 256> made{};
    for (std::size_t i = 0; i < 256; ++i) made[i] = substitute(static_cast<std::uint8_t>(i));
    return made;
  }();
  Block out;
  for (std::size_t column = 0; column < 4; ++column) {
    std::array<std::uint8_t, 4> in;
    for (std::size_t row = 0; row < 4; ++row) in[row] = table[block[4 * ((column + row) % 4) + row]];
    for (std::size_t row = 0; row < 4; ++row) {
      out[4 * column + row] = static_cast<std::uint8_t>(
          twice(in[row]) ^ twice(in[(row + 1) % 4]) ^ in[(row + 1) % 4] ^ in[(row + 2) % 4] ^
          in[(row + 3) % 4]);
    }
  }
  return xored(out, key);
}

// AEGIS-128X2 word for word after the draft, with its associated data.
class Naive {
 public:
  Naive(const Bytes& key_bytes_, const Bytes& nonce_bytes_) {
    const Block key = block_at(key_bytes_, 0);
    const Block nonce = block_at(nonce_bytes_, 0);
    const Block c0 = {0x00, 0x01, 0x01, 0x02, 0x03, 0x05, 0x08, 0x0d,
                      0x15, 0x22, 0x37, 0x59, 0x90, 0xe9, 0x79, 0x62};
    const Block c1 = {0xdb, 0x3d, 0x18, 0x55, 0x6d, 0xc2, 0x2f, 0xf1,
                      0x20, 0x11, 0x31, 0x42, 0x73, 0xb5, 0x28, 0xdd};
    for (auto& v : states_) {
      v = {xored(key, nonce), c1, c0, c1, xored(key, nonce), xored(key, c0), xored(key, c1),
           xored(key, c0)};
    }
    for (int i = 0; i < 10; ++i) {
      for (std::uint8_t state = 0; state < 2; ++state) {
        const Block context = {state, 1};
        states_[state][3] = xored(states_[state][3], context);
        states_[state][7] = xored(states_[state][7], context);
      }
      update({nonce, nonce, key, key});
    }
  }

  // The ciphertext and its tag.
  Bytes seal(const Bytes& associated, const Bytes& plain) {
    for (std::size_t at = 0; at < associated.size(); at += 64) update(blocks_at(associated, at));
    Bytes out;
    for (std::size_t at = 0; at < plain.size(); at += 64) {
      const auto message = blocks_at(plain, at);
      for (std::size_t i = 0; i < 4; ++i) {
        const auto& v = states_[i % 2];
        const Block stream = i < 2 ? xored(xored(v[6], v[1]), both(v[2], v[3]))
                                   : xored(xored(v[2], v[5]), both(v[6], v[7]));
        const Block sealed = xored(message[i], stream);
        out.insert(out.end(), sealed.begin(), sealed.end());
      }
      update(message);
    }
    out.resize(plain.size());
    Block lengths{};
    const std::uint64_t bits[2] = {8 * associated.size(), 8 * plain.size()};
    std::memcpy(lengths.data(), bits, sizeof bits);
    const Block first = xored(states_[0][2], lengths);
    const Block second = xored(states_[1][2], lengths);
    for (int i = 0; i < 7; ++i) update({first, second, first, second});
    Block tag{};
    for (const auto& v : states_) {
      for (std::size_t i = 0; i < 7; ++i) tag = xored(tag, v[i]);
    }
    out.insert(out.end(), tag.begin(), tag.end());
    return out;
  }

 private:
  using Blocks = std::array<Block, 4>;  // of both states, then of both states

  static Block block_at(const Bytes& bytes, std::size_t at) {
    Block block{};
    for (std::size_t i = 0; i < 16 && at + i < bytes.size(); ++i) block[i] = bytes[at + i];
    return block;
  }

  static Blocks blocks_at(const Bytes& bytes, std::size_t at) {
    return {block_at(bytes, at), block_at(bytes, at + 16), block_at(bytes, at + 32),
            block_at(bytes, at + 48)};
  }

  void update(const Blocks& message) {
    for (std::size_t state = 0; state < 2; ++state) {
      const auto v = states_[state];
      for (std::size_t i = 0; i < 8; ++i) states_[state][i] = round_of(v[(i + 7) % 8], v[i]);
      states_[state][0] = xored(states_[state][0], message[state]);
      states_[state][4] = xored(states_[state][4], message[2 + state]);
    }
  }

  std::array<std::array<Block, 8>, 2> states_;
};

Bytes bytes_of(const std::string& digits) {
  Bytes out;
  for (std::size_t i = 0; i < digits.size(); i += 2) {
    out.push_back(static_cast<std::uint8_t>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return out;
}

Bytes random_bytes(std::mt19937& random, std::size_t count) {
  Bytes out(count);
  for (auto& each : out) each = static_cast<std::uint8_t>(random());
  return out;
}

Bytes sealed(Cipher& cipher, const Bytes& plain) {
  Bytes out(plain.size() + tag_bytes);
  cipher.seal(plain.data(), plain.size(), out.data());
  return out;
}

bool opens(Cipher& cipher, Bytes& data) {
  const std::size_t bytes = data.size() - tag_bytes;
  const Bytes tag(data.end() - tag_bytes, data.end());
  data.resize(bytes);
  return cipher.open(data.data(), bytes, tag.data());
}

// The vectors of the draft. The second one has associated data, which connections do not use.
void check_naive() {
  const Bytes key = bytes_of("000102030405060708090a0b0c0d0e0f");
  const Bytes nonce = bytes_of("101112131415161718191a1b1c1d1e1f");
  expect(Naive(key, nonce).seal({}, {}) == bytes_of("63117dc57756e402819a82e13eca8379"),
         "an empty message is sealed as published");
  Bytes plain;
  for (int i = 0; i < 30; ++i) plain.insert(plain.end(), {4, 5, 6, 7});
  expect(Naive(key, nonce).seal(bytes_of("0102030401020304"), plain) ==
             bytes_of("5795544301997f93621b278809d6331b3bfa6f18e90db12c4aa35965b5e98c5f"
                      "c6fb4e54bcb6111842c20637252eff747cb3a8f85b37de80919a589fe0f24872"
                      "bc926360696739e05520647e390989e1eb5fd42f99678a0276a498f8c454761c"
                      "9d6aacb647ad56be62b29c22cd4b5761b38f43d5a5ee062f"
                      "1aebc200804f405cab637f2adebb6d77"),
         "a message with associated data is sealed as published");
}

// All implementations produce the bytes of the draft, whatever the length and the place in memory.
void check_implementations() {
  std::mt19937 random(7);
  for (std::size_t turn = 0; turn < 600; ++turn) {
    const std::size_t length = turn < 300 ? turn : random() % 3000;
    const auto from = static_cast<std::ptrdiff_t>(random() % 64);
    const auto to = static_cast<std::ptrdiff_t>(random() % 64);
    const Bytes key = random_bytes(random, key_bytes);
    const Bytes nonce = random_bytes(random, nonce_bytes);
    const Bytes plain = random_bytes(random, length);
    const Bytes expected = Naive(key, nonce).seal({}, plain);
    for (const Aegis* each : usable_aegis()) {
      const std::string name = each->name;
      Bytes source(static_cast<std::size_t>(from) + length);
      std::copy(plain.begin(), plain.end(), source.begin() + from);
      Bytes out(static_cast<std::size_t>(to) + length + tag_bytes, 0xa5);
      each->seal(key.data(), nonce.data(), source.data() + from, length, out.data() + to);
      expect(std::equal(expected.begin(), expected.end(), out.begin() + to, out.end()),
             name + " seals as the draft says");
      expect(std::count(out.begin(), out.begin() + to, 0xa5) == to,
             name + " writes nothing before the piece");
      Bytes tag(expected.end() - tag_bytes, expected.end());
      out.resize(static_cast<std::size_t>(to) + length);
      expect(each->open(key.data(), nonce.data(), out.data() + to, length, tag.data()) &&
                 std::equal(plain.begin(), plain.end(), out.begin() + to, out.end()),
             name + " opens what was sealed");
      tag[turn % tag_bytes] ^= static_cast<std::uint8_t>(1U << (turn % 8));
      std::copy(expected.begin(), expected.end() - tag_bytes, out.begin() + to);
      expect(!each->open(key.data(), nonce.data(), out.data() + to, length, tag.data()) &&
                 std::all_of(out.begin() + to, out.end(), [](auto byte) { return byte == 0; }),
             name + " does not open with a wrong tag");
    }
  }
}

// Each bit of a piece counts, and what does not open is not returned.
void check_changes() {
  std::mt19937 random(3);
  const Bytes key = random_bytes(random, key_bytes);
  for (std::size_t length = 0; length < 70; ++length) {
    const Bytes plain = random_bytes(random, length);
    for (std::size_t bit = 0; bit < 8 * (length + tag_bytes); ++bit) {
      Cipher sender(key.data());
      Cipher receiver(key.data());
      Bytes data = sealed(sender, plain);
      data[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
      expect(!opens(receiver, data), "a changed piece does not open");
      expect(data == Bytes(length), "a changed piece becomes zeros");
    }
  }
}

void check_order() {
  std::mt19937 random(5);
  const Bytes key = random_bytes(random, key_bytes);
  Cipher sender(key.data());
  Cipher receiver(key.data());
  Bytes other_key = key;
  other_key[0] ^= 1;
  for (int i = 0; i < 300; ++i) {
    const Bytes plain = random_bytes(random, random() % 200);
    const Bytes first = sealed(sender, plain);
    const Bytes second = sealed(sender, plain);
    expect(first != second, "no two pieces are sealed alike");
    Cipher early = receiver;
    Bytes data = second;
    expect(!opens(early, data), "a piece does not open before its turn");
    Cipher stranger(other_key.data());
    data = first;
    expect(!opens(stranger, data), "a piece does not open with another key");
    data = first;
    expect(opens(receiver, data) && data == plain, "a piece opens in its turn");
    Cipher again = receiver;
    data = first;
    expect(!opens(again, data), "a piece does not open twice");
    if (i % 2 == 0) {
      receiver.skip();
    } else {
      data = second;
      expect(opens(receiver, data) && data == plain, "the next piece opens");
    }
  }
}

}  // namespace

void check() {
  check_naive();
  if (!can_encrypt()) return;
  check_implementations();
  check_changes();
  check_order();
}

}  // namespace ciphers
