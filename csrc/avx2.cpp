#define OVERSPILL_NAME avx2
#include "rules.inc"
