/* spawner --socket FD --guest FD --guest-uid N, and for places, all or none: --ids, --unified, --trees FD (directories),
 * --v1 FD for each v1 hierarchy (limits name them 0, 1, …), --uid-first, --uid-size, --slots N, --instance NAME. */
#ifndef BARCHAN_SPAWNER_ARGUMENTS_H
#define BARCHAN_SPAWNER_ARGUMENTS_H
#include <stdint.h>

#include "places.h"

struct spawner_arguments {
    int control, guest;
    uint32_t guest_uid;
    struct place_directories places; /* `trees.trees` is -1 without them */
};

/* -1 if they are not as above. */
int read_arguments(int count, char **arguments, struct spawner_arguments *given);
#endif
