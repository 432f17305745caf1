/* The least that a test needs: say where and stop. */
#ifndef BARCHAN_CHECK_H
#define BARCHAN_CHECK_H
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                              \
        }                                                                         \
    } while (0)
#endif
