// Finds inputs for a target by coverage: fuzz --target=NAME [options of libFuzzer] [corpus].
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "fuzz.h"

namespace {

const fuzz::Target* chosen = nullptr;

}  // namespace

// libFuzzer ignores options that begin with two hyphens, and passes them to its own children.
extern "C" int LLVMFuzzerInitialize(int* count, char*** words) {
  constexpr std::string_view option = "--target=";
  for (int i = 1; i < *count; ++i) {
    const std::string_view word = (*words)[i];
    if (word.starts_with(option)) chosen = fuzz::find_target(word.substr(option.size()));
  }
  if (chosen != nullptr) return 0;
  std::fprintf(stderr, "fuzz: --target= is one of");
  for (const fuzz::Target& each : fuzz::targets) std::fprintf(stderr, " %s", each.name.data());
  std::fprintf(stderr, "\n");
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  chosen->run({data, size});
  return 0;
}
