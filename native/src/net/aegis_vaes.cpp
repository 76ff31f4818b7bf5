// AES instructions for two blocks.
#include <immintrin.h>

namespace wingbeat::net {

namespace {

using Vector = __m256i;

Vector aes_round(Vector blocks, Vector key) { return _mm256_aesenc_epi128(blocks, key); }

}  // namespace

}  // namespace wingbeat::net

#define WINGBEAT_AEGIS aegis_with_vaes
#define WINGBEAT_AEGIS_NAME "vaes"
#include "aegis.inc"
