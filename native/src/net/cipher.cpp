#include "cipher.h"

#include <cstring>
#include <stdexcept>

#include "../layout.h"
#include "../processor.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace wingbeat::net {

const std::vector<const Aegis*>& usable_aegis() {
  static const auto found = [] {
    std::vector<const Aegis*> usable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && has_vaes()) {
      usable.push_back(&aegis_with_vaes);
    }
    if (__builtin_cpu_supports("aes") && __builtin_cpu_supports("avx")) {
      usable.push_back(&aegis_with_aes);
    }
#elif defined(__aarch64__) && defined(__linux__)
    if ((::getauxval(AT_HWCAP) & HWCAP_AES) != 0) usable.push_back(&aegis_with_aes);
#endif
    return usable;
  }();
  return found;
}

Cipher::Cipher(const std::uint8_t* key) {
  if (!can_encrypt()) throw std::runtime_error("this processor has no AES instructions");
  std::memcpy(key_.data(), key, key_bytes);
}

std::array<std::uint8_t, nonce_bytes> Cipher::next_nonce() {
  std::array<std::uint8_t, nonce_bytes> nonce{};
  store(nonce.data(), number_++);
  return nonce;
}

void Cipher::seal(const std::uint8_t* plain, std::size_t bytes, std::uint8_t* out) {
  usable_aegis().front()->seal(key_.data(), next_nonce().data(), plain, bytes, out);
}

bool Cipher::open(std::uint8_t* data, std::size_t bytes, const std::uint8_t* tag) {
  return usable_aegis().front()->open(key_.data(), next_nonce().data(), data, bytes, tag);
}

}  // namespace wingbeat::net
