// Payloads of encoded chunks as a peer may send them, and values of any bits on their way out.
#include <cmath>
#include <memory>

#include "fuzz.h"
#include "net/coding.h"

namespace fuzz {

namespace {

using namespace wingbeat;
using namespace wingbeat::net;

std::shared_ptr<Coding> coding_of(Input& input, std::uint64_t n) {
  auto coding = std::make_shared<Coding>();
  constexpr double densities[] = {0.001, 0.01, 0.1, 0.5};
  for (std::uint64_t at = 0; at < n;) {
    const bool last = coding->regions.size() == 3 || input.flag();
    Region region{at, last ? n : std::min(n, at + 1 + input.below(n)),
                  static_cast<Codec>(input.byte() % 4)};
    region.bits = 1 + input.byte() % 8;
    if (region.codec == Codec::topk && input.flag()) region.bits = whole_bits;
    region.feedback = input.flag();
    region.split = input.flag() ? Split::error : Split::count;
    region.level = input.flag() ? Level::mean : Level::ends;
    region.density = densities[input.byte() % 4];
    at = region.stop;
    coding->regions.push_back(region);
  }
  return coding;
}

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float each) { return std::isfinite(each); });
}

// The bytes of the input, again and again.
template <class T>
void fill(std::vector<T>& into, const Bytes& bytes) {
  if (bytes.empty()) return;
  auto* const to = reinterpret_cast<std::uint8_t*>(into.data());
  for (std::size_t i = 0; i < into.size() * sizeof(T); ++i) to[i] = bytes[i % bytes.size()];
}

}  // namespace

void run_codecs(Input input) {
  const std::uint64_t n = 1 + (input.byte() < 8 ? input.below(70'000) : input.below(600));
  const auto coding = coding_of(input, n);
  const bool decodes = input.flag(), add = input.flag(), residuals = input.flag();
  const unsigned threads = 1;
  const Bytes rest = input.bytes(n * 4 + 64);
  std::vector<float> values(n), residual(n);
  const EncodedPacking packing(coding, residuals ? residual.data() : nullptr, threads);
  const std::unique_ptr<std::uint8_t[]> chunk(new std::uint8_t[packing.bytes(0, n)]);
  if (decodes) {  // anything, in place of a payload
    for (std::uint64_t i = 0; i < packing.bytes(0, n); ++i) chunk[i] = i < rest.size() ? rest[i] : 0;
    const float before = 3.0F;
    std::fill(values.begin(), values.end(), before);
    auto* const buffer = reinterpret_cast<std::uint8_t*>(values.data());
    const char* const wrong = packing.unpack(chunk.get(), buffer, 0, n, add);
    const bool refused_alone = wrong != nullptr && coding->regions.size() == 1;
    check(!refused_alone || values == std::vector<float>(n, before),
          "a payload that is refused leaves the values as they were");
    return;
  }
  fill(values, rest);
  const bool finite = all_finite(values);
  packing.pack(reinterpret_cast<std::uint8_t*>(values.data()), 0, n, chunk.get(), false);
  std::vector<float> arrived(n);
  auto* const into = reinterpret_cast<std::uint8_t*>(arrived.data());
  check(packing.unpack(chunk.get(), into, 0, n, false) == nullptr, "what is packed can be unpacked");
  check(finite || !all_finite(arrived), "a value that is not finite is not lost");
  if (residuals) check(all_finite(residual) || !finite, "residuals of finite values are finite");
}

}  // namespace fuzz
