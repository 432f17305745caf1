/* What the fuzz targets share. Each is one program: libFuzzer, the product's own sources, fakes for the system calls. */
#ifndef BARCHAN_FUZZ_H
#define BARCHAN_FUZZ_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* A property of the parser; libFuzzer keeps the input that breaks it. */
#define HOLDS(property)                                                          \
    do {                                                                         \
        if (!(property)) {                                                       \
            fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #property); \
            abort();                                                             \
        }                                                                        \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

/* Cheap and repeatable: the next of a row of numbers below `sides`. */
uint32_t dice(uint32_t *state, uint32_t sides);

/* The rules of the formats, for custom mutators. Each changes the whole input in place and returns its new size. */

/* Changes one string with a u32 length before it, and the length with it. */
size_t mutate_counted(uint8_t *data, size_t size, size_t most, uint32_t *state);
/* Changes, repeats, drops or swaps whole frames of the stream that begins at `from`. */
size_t mutate_frames(uint8_t *data, size_t size, size_t most, size_t from, uint32_t *state);
/* Changes one field between `:`, `,` and line ends; at times to a length next to a power of two. */
size_t mutate_fields(uint8_t *data, size_t size, size_t most, uint32_t *state);
#endif
