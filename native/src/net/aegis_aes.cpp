// AES instructions for one block.
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace wingbeat::net {

namespace {

#if defined(__x86_64__)
using Vector = __m128i;
Vector aes_round(Vector block, Vector key) { return _mm_aesenc_si128(block, key); }
#else
using Vector = uint8x16_t;
Vector aes_round(Vector block, Vector key) { return vaesmcq_u8(vaeseq_u8(block, Vector{})) ^ key; }
#endif

}  // namespace

}  // namespace wingbeat::net

#define WINGBEAT_AEGIS aegis_with_aes
#define WINGBEAT_AEGIS_NAME "aes"
#include "aegis.inc"
