#include "halves.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "loops.h"

namespace naive {

namespace {

using Payload = std::unique_ptr<std::uint8_t[]>;

// By the meaning of the bits: sign, exponent, fraction.
float meant(std::uint16_t half, bool bfloat16) {
  const int fraction = bfloat16 ? 7 : 10;
  const int exponents = bfloat16 ? 255 : 31;
  const int exponent = half >> fraction & exponents;
  const int rest = half & ((1 << fraction) - 1);
  const float sign = (half & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == exponents) return rest != 0 ? NAN : sign * INFINITY;
  const int whole = exponent == 0 ? rest : rest + (1 << fraction);
  const int least = exponent == 0 ? 1 : exponent;
  return sign * std::ldexp(static_cast<float>(whole), least - (exponents >> 1) - fraction);
}

bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

// Payloads have exactly their size and begin at an odd address.
Payload payload_of(const std::vector<std::uint16_t>& halves) {
  auto payload = std::make_unique<std::uint8_t[]>(2 * halves.size() + 1);
  if (!halves.empty()) std::memcpy(payload.get() + 1, halves.data(), 2 * halves.size());
  return payload;
}

}  // namespace

std::string wrong_half(unsigned seed) {
  std::mt19937 draw(seed);
  const std::size_t n = draw() % 3 == 0 ? 1000 + draw() % 100 : draw() % 40;
  const bool bfloat16 = seed % 2 == 0, begin = seed / 2 % 2 == 0;
  wingbeat::prefer_portable(seed / 4 % 2 == 0);
  const wingbeat::Loops& loops = wingbeat::loops();
  wingbeat::prefer_portable(false);
  std::vector<std::uint16_t> first(n), second(n), back(n);
  for (std::size_t i = 0; i < n; ++i) {
    first[i] = static_cast<std::uint16_t>(draw());
    second[i] = static_cast<std::uint16_t>(draw());
  }
  std::vector<float> total(n, 1.0F), wide(n);
  const Payload a = payload_of(first), b = payload_of(second);
  const std::uint8_t* both[] = {a.get() + 1, b.get() + 1};
  loops.add_half(both, 2, n, bfloat16, begin, total.data());
  loops.add_half(both, 1, n, bfloat16, true, wide.data());
  loops.narrow_half(wide.data(), n, bfloat16, back.data());
  for (std::size_t i = 0; i < n; ++i) {
    const float one = meant(first[i], bfloat16), two = meant(second[i], bfloat16);
    if (!same(wide[i], one)) return "a payload begins a sum";
    if (!same(total[i], (begin ? one : 1.0F + one) + two)) return "payloads are added in turn";
    if (!same(meant(back[i], bfloat16), one)) return "what had 16 bits comes back";
  }
  return "";
}

}  // namespace naive
