// What the parts of the program `hostile` share; hostile.cpp describes it.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>

#include "checks.h"

namespace hostile {

using checks::Bytes;
using checks::expect;
using checks::Medium;
using Random = std::mt19937_64;

// Hostile frames by what becomes of them: the reason of their refusal, or why they do no harm.
using Tally = std::map<std::string, std::uint64_t>;

inline std::uint32_t word(Random& random) { return static_cast<std::uint32_t>(random()); }
inline bool one_in(Random& random, unsigned int n) { return random() % n == 0; }
Bytes random_bytes(Random& random, std::size_t count);
// Any value but this one that differs in the lowest `bits`.
std::uint64_t other_than(std::uint64_t value, unsigned int bits, Random& random);
// Any greater value.
std::uint64_t above(std::uint64_t value, Random& random);
std::uint64_t total(const Tally& tally);

// Sends bytes in pieces of random sizes; ends early if the other side has closed the connection.
void send_in_pieces(int fd, const Bytes& bytes, Random& random);
// Ends this direction, if asked to, and returns what comes until the other side closes the
// connection.
Bytes read_to_end(int fd, bool end);

// Each sends at least so many hostile frames, and checks the result of each.
Tally attack_handshakes(std::uint64_t frames, Random& random);
Tally attack_dialing(std::uint64_t frames, Random& random);
Tally attack_messages(std::uint64_t frames, bool encrypted, Random& random);
Tally attack_collectives(std::uint64_t frames, Medium medium, Random& random);
Tally attack_ring_memory(std::uint64_t frames, Random& random);
Tally attack_codecs(std::uint64_t frames, Random& random);

}  // namespace hostile
