#include "temporary.h"
#include "paths.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/random.h>

bool temporary_name(char name[TEMPORARY_MAX]) {
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return false;
    snprintf(name, TEMPORARY_MAX, ".barchan-%016llx", (unsigned long long)random);
    return true;
}

int open_temporary(int dir, char name[TEMPORARY_MAX]) {
    return temporary_name(name) ? open_path(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600) : -1;
}
