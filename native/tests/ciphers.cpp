#include "ciphers.h"

#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"
#include "net/cipher.h"

namespace ciphers {

namespace {

using checks::expect;
using namespace wingbeat::net;

using Bytes = std::vector<std::uint8_t>;

struct Vector {
  std::string key, nonce, plain, sealed, tag;
};

// From Project Wycheproof (aegis128L_test.json); the first one is of the draft.
const Vector vectors[] = {
    {"00000000000000000000000000000000", "00000000000000000000000000000000",
     "00000000000000000000000000000000",
     "41de9000a7b5e40e2d68bb64d99ebb19",
     "f4d997cc9b94227ada4fe4165422b1c8"},
    {"00000000000000000000000000000000", "00000000000000000000000000000000",
     "",
     "",
     "83cc600dc4e3e7e62d4055826174f149"},
    {"55565758595a5b5c5d5e5f6061626364", "b0b1b2b3b4b5b6b7b8b9babbbcbdbebf",
     "",
     "",
     "439ef345a332a4f83c9cc28debea9be0"},
    {"4ca75d221f93bea97e3571832b87dfb3", "934a839a6e56c11f6f4e66ba1bb65671",
     "ae09c978",
     "f70ddc33",
     "9f183378f0f4152667430c7c6d9f164d"},
    {"0b11ef3a08c02970f74281c860691c75", "95c1dd8c0f1705ece68937901f7add7b",
     "f693d4edd825dbb0618d91113128880dbebb23e25d00ed1f077d870be9cc7536",
     "aeaaca3901e2e93a4527b98db338e199d27ad6dca8f04ef1f947be9af527a20f",
     "a2cf6396303a20042a3838226f6962e7"},
    {"bc59288ec36ed0219b8d2c9c0aeed105", "6f13a7ffed6de57837f79032bb689958",
     "78cdaad403c3b056fad70f4d43ff1b621671ecf698533d3751818f713f498c91"
     "b1765c",
     "44410577be2cbec486d1a9eaa88c796f5664836ddc59e1988b1692382b79c935"
     "3c0b6c",
     "e5b8621fba60bc3faef129748b4d7084"},
    {"dead90d600924ca0a36e9ea1c3f43b6e", "74294502b61e288ed4ef4d81b655b522",
     "e49c523ee08f78adb0a55461b4742be1e7906b47b264eaa91cc913febec64c02"
     "d177d028dbbca9603fbfe119be6d50e69b6d687596fbba00cf96d02de2fd7f6c"
     "36fc189e84985cbef7be320e059a17cbddf98892a7948fdd5ce96e2c24660b7d"
     "80cc7d8f",
     "a85959e96494d817b532a636c0586afc7733c0fd9f38c94e1d4bd1773f2a7800"
     "64853bdb237705b80cd2eae3778e7533d0683ee4b85bea1624e5ce0b7c2ed75b"
     "2d19ffd295bb8d702148f677012ff94922f89bcd10f79b77a3c57eec9b99dfd2"
     "3e4e5d01",
     "6445e1b6e4b1dfd2dc8c5c78761c75dc"},
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

void check_vectors() {
  for (const Vector& each : vectors) {
    const Bytes key = bytes_of(each.key);
    const Bytes nonce = bytes_of(each.nonce);
    const Bytes plain = bytes_of(each.plain);
    const Bytes expected = bytes_of(each.sealed + each.tag);
    Bytes out(plain.size() + tag_bytes);
    aegis::seal(key.data(), nonce.data(), plain.data(), plain.size(), out.data());
    expect(out == expected, "a known message is sealed as published");
    const Bytes tag(out.end() - tag_bytes, out.end());
    out.resize(plain.size());
    expect(aegis::open(key.data(), nonce.data(), out.data(), out.size(), tag.data()),
           "a known message opens");
    expect(out == plain, "a known message opens to what was sealed");
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
  if (!aegis::supported()) return;
  check_vectors();
  check_changes();
  check_order();
}

}  // namespace ciphers
