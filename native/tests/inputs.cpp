#include "inputs.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

namespace naive {

namespace {

float any_bits(std::mt19937& random) {
  const auto bits = static_cast<std::uint32_t>(random());
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float draw(const std::string& kind, std::size_t i, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::uint32_t dice = static_cast<std::uint32_t>(random()) % 1000;
  if (kind == "heavy") return normal(random) * std::exp(3 * normal(random));
  if (kind == "constant") return -0.75F;
  if (kind == "zeros") return i % 3 == 0 ? -0.0F : 0.0F;
  if (kind == "sparse") return dice < 2 ? normal(random) : 0.0F;
  if (kind == "few") return static_cast<float>(dice % 5) - 2.0F;
  if (kind == "denormal") return normal(random) * 1e-40F;
  if (kind == "infinite") return dice < 3 ? (dice == 0 ? -inf : inf) : normal(random);
  if (kind == "nan") return dice < 3 ? nan : normal(random) * 1e-3F;
  if (kind == "any bits") return any_bits(random);
  if (kind == "rising") return static_cast<float>(i) * 1e-3F;
  if (kind == "broken") return dice % 2 == 0 ? nan : (dice % 3 == 0 ? inf : 1.0F);
  return normal(random);
}

}  // namespace

Floats make(const std::string& kind, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  Floats out(n);
  for (std::size_t i = 0; i < n; ++i) out[i] = draw(kind, i, random);
  return out;
}

}  // namespace naive
