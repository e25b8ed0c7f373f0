// y [M, O] = x [M, I] times the transpose of weight [O, I], plus a bias [O], for a few rows (gemm_rows.h). Threads share
// the outputs.

#include "op.h"
#include "simd.h"
#include "gemm_rows.h"

TYPED_OP(linear, linear, Linear)
OP(linear_f32_of_bf16, (linear<float, float, bf16>), Linear)
OP(linear_f32_of_f16, (linear<float, float, f16>), Linear)
