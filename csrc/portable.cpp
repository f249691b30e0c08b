#define OVERSPILL_NAME portable
#include "rules.inc"
