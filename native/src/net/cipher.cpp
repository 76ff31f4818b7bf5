#include "cipher.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "../layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace wingbeat::net {

namespace aegis {

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))

namespace {

// `aes_round`: SubBytes, ShiftRows, MixColumns, then xor with the round key. On x86-64 each function
// that needs the instructions says so itself: with an option for the whole file the templates that
// it uses would need them too, and the linker keeps one copy of a template for all files.
#if defined(__x86_64__)
#define WINGBEAT_WITH_AES __attribute__((target("aes,avx")))
using Block = __m128i;

WINGBEAT_WITH_AES Block aes_round(Block block, Block key) { return _mm_aesenc_si128(block, key); }
#else
#define WINGBEAT_WITH_AES
using Block = uint8x16_t;

Block aes_round(Block block, Block key) {
  return vaesmcq_u8(vaeseq_u8(block, Block{})) ^ key;
}
#endif

constexpr std::size_t pair_bytes = 2 * sizeof(Block);

constexpr std::uint8_t fibonacci[pair_bytes] = {
    0x00, 0x01, 0x01, 0x02, 0x03, 0x05, 0x08, 0x0d, 0x15, 0x22, 0x37, 0x59, 0x90, 0xe9, 0x79, 0x62,
    0xdb, 0x3d, 0x18, 0x55, 0x6d, 0xc2, 0x2f, 0xf1, 0x20, 0x11, 0x31, 0x42, 0x73, 0xb5, 0x28, 0xdd};

// The state of the draft, with its names. No branch and no address depends on a secret.
struct State {
  Block s0, s1, s2, s3, s4, s5, s6, s7;

  WINGBEAT_WITH_AES State(const std::uint8_t* key_at, const std::uint8_t* nonce_at) {
    const auto key = load<Block>(key_at);
    const auto nonce = load<Block>(nonce_at);
    const auto c0 = load<Block>(fibonacci);
    const auto c1 = load<Block>(fibonacci + sizeof(Block));
    s0 = s4 = key ^ nonce;
    s1 = s3 = c1;
    s2 = c0;
    s5 = s7 = key ^ c0;
    s6 = key ^ c1;
    for (int i = 0; i < 10; ++i) update(nonce, key);
  }

  // Adds the message after the rounds: it is known last when decrypting.
  WINGBEAT_WITH_AES void update(Block m0, Block m1) {
    const Block last = s7;
    s7 = aes_round(s6, s7);
    s6 = aes_round(s5, s6);
    s5 = aes_round(s4, s5);
    s4 = aes_round(s3, s4) ^ m1;
    s3 = aes_round(s2, s3);
    s2 = aes_round(s1, s2);
    s1 = aes_round(s0, s1);
    s0 = aes_round(last, s0) ^ m0;
  }

  WINGBEAT_WITH_AES void encrypt(const std::uint8_t* from, std::uint8_t* to) {
    const auto t0 = load<Block>(from);
    const auto t1 = load<Block>(from + sizeof(Block));
    store(to, t0 ^ s6 ^ s1 ^ (s2 & s3));
    store(to + sizeof(Block), t1 ^ s2 ^ s5 ^ (s6 & s7));
    update(t0, t1);
  }

  // Of the last pair only `bytes` bytes belong to the message; zeros follow them.
  WINGBEAT_WITH_AES void decrypt(std::uint8_t* data, std::size_t bytes = pair_bytes) {
    Block t0 = load<Block>(data) ^ s6 ^ s1 ^ (s2 & s3);
    Block t1 = load<Block>(data + sizeof(Block)) ^ s2 ^ s5 ^ (s6 & s7);
    store(data, t0);
    store(data + sizeof(Block), t1);
    if (bytes < pair_bytes) {
      std::memset(data + bytes, 0, pair_bytes - bytes);
      t0 = load<Block>(data);
      t1 = load<Block>(data + sizeof(Block));
    }
    update(t0, t1);
  }

  WINGBEAT_WITH_AES Block tag(std::size_t bytes) {
    const std::uint64_t bits[2] = {0, std::uint64_t{bytes} * 8};
    const Block t = s2 ^ load<Block>(bits);
    for (int i = 0; i < 7; ++i) update(t, t);
    return s0 ^ s1 ^ s2 ^ s3 ^ s4 ^ s5 ^ s6;
  }
};

}  // namespace

bool supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("avx");
#else
  return (::getauxval(AT_HWCAP) & HWCAP_AES) != 0;
#endif
}

WINGBEAT_WITH_AES
void seal(const std::uint8_t* key, const std::uint8_t* nonce, const std::uint8_t* plain,
          std::size_t bytes, std::uint8_t* out) {
  State state(key, nonce);
  const std::size_t whole = bytes - bytes % pair_bytes;
  for (std::size_t i = 0; i < whole; i += pair_bytes) state.encrypt(plain + i, out + i);
  if (whole < bytes) {
    std::uint8_t tail[pair_bytes] = {};
    std::memcpy(tail, plain + whole, bytes - whole);
    state.encrypt(tail, tail);
    std::memcpy(out + whole, tail, bytes - whole);
  }
  store(out + bytes, state.tag(bytes));
}

WINGBEAT_WITH_AES
bool open(const std::uint8_t* key, const std::uint8_t* nonce, std::uint8_t* data,
          std::size_t bytes, const std::uint8_t* tag) {
  State state(key, nonce);
  const std::size_t whole = bytes - bytes % pair_bytes;
  for (std::size_t i = 0; i < whole; i += pair_bytes) state.decrypt(data + i);
  if (whole < bytes) {
    std::uint8_t tail[pair_bytes] = {};
    std::memcpy(tail, data + whole, bytes - whole);
    state.decrypt(tail, bytes - whole);
    std::memcpy(data + whole, tail, bytes - whole);
  }
  std::uint64_t differences[2];
  store(differences, state.tag(bytes) ^ load<Block>(tag));
  if ((differences[0] | differences[1]) == 0) return true;
  if (bytes > 0) std::memset(data, 0, bytes);
  return false;
}

#else

bool supported() { return false; }
void seal(const std::uint8_t*, const std::uint8_t*, const std::uint8_t*, std::size_t,
          std::uint8_t*) {
  std::abort();
}
bool open(const std::uint8_t*, const std::uint8_t*, std::uint8_t*, std::size_t,
          const std::uint8_t*) {
  std::abort();
}

#endif

}  // namespace aegis

Cipher::Cipher(const std::uint8_t* key) {
  if (!aegis::supported()) throw std::runtime_error("this processor has no AES instructions");
  std::memcpy(key_.data(), key, key_bytes);
}

std::array<std::uint8_t, nonce_bytes> Cipher::next_nonce() {
  std::array<std::uint8_t, nonce_bytes> nonce{};
  store(nonce.data(), number_++);
  return nonce;
}

void Cipher::seal(const std::uint8_t* plain, std::size_t bytes, std::uint8_t* out) {
  aegis::seal(key_.data(), next_nonce().data(), plain, bytes, out);
}

bool Cipher::open(std::uint8_t* data, std::size_t bytes, const std::uint8_t* tag) {
  return aegis::open(key_.data(), next_nonce().data(), data, bytes, tag);
}

}  // namespace wingbeat::net
