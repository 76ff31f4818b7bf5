#include <immintrin.h>

#define WINGBEAT_LOOPS avx2_loops
#define WINGBEAT_LOOPS_NAME "avx2"
#include "loops.inc"
