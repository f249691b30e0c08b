#define OVERSPILL_NAME avx512
#include "rules.inc"
