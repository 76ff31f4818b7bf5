// Runs every input of a corpus: replay FOLDER, with a folder for each target; or replay TARGET FILE...
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "fuzz.h"

namespace {

void run(const fuzz::Target& target, const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const fuzz::Bytes bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file && !file.eof()) {
    std::fprintf(stderr, "replay: cannot read %s\n", path.c_str());
    std::exit(1);
  }
  target.run({bytes.data(), bytes.size()});
}

// Each input is exactly as large as its memory, so that the sanitizers see what is read beyond it.
int replay_all(const std::filesystem::path& folder) {
  for (const fuzz::Target& target : fuzz::targets) {
    std::size_t count = 0;
    for (const auto& each : std::filesystem::directory_iterator(folder / target.name)) {
      run(target, each.path());
      ++count;
    }
    fuzz::check(count > 0, "a corpus is empty");
    std::printf("replay: %s: %zu inputs\n", target.name.data(), count);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count == 2) return replay_all(words[1]);
    const fuzz::Target* const target = count > 2 ? fuzz::find_target(words[1]) : nullptr;
    fuzz::check(target != nullptr, "usage: replay FOLDER, or replay TARGET FILE...");
    for (int i = 2; i < count; ++i) run(*target, words[i]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "replay: %s\n", error.what());
    return 1;
  }
}
