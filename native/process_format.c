#include "groups.h"
#include "tasks.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#define FORKED_NO_EXEC 0x40u /* PF_FORKNOEXEC */

static unsigned long field(const char *status, const char *name) {
    const char *at = strstr(status, name);
    return at ? strtoul(at + strlen(name), NULL, 10) : 0;
}

static void put_argv(struct writer *w, const char *text, size_t size) {
    uint8_t *count_at = w->at;
    uint32_t count = 0;
    put_u32(w, 0);
    while (size) {
        size_t one = strnlen(text, size);
        put_bytes(w, text, (uint32_t)one);
        count++;
        one += one < size;
        text += one;
        size -= one;
    }
    memcpy(count_at, &count, sizeof count);
}

void process_put(struct writer *w, int pid, uint64_t op, const char *status, const char *argv, size_t argv_size) {
    const char *state = strstr(status, "\nState:\t");
    put_u32(w, (uint32_t)pid);
    put_u32(w, (uint32_t)field(status, "\nPPid:\t"));
    put_u32(w, (uint32_t)field(status, "\nUid:\t"));
    put_u32(w, state ? (uint8_t)state[8] : '?');
    put_u64(w, field(status, "\nVmRSS:\t") * 1024u);
    put_u64(w, op);
    put_argv(w, argv, argv_size);
}

uint32_t pids_parse(const char *text, size_t size, uint32_t *partial, void (*each)(int pid, void *context), void *context) {
    uint32_t lines = 0;
    for (size_t i = 0; i < size; i++) {
        if (text[i] != '\n') {
            *partial = *partial * 10 + (uint8_t)(text[i] - '0');
            continue;
        }
        lines++;
        if (each && *partial > 0 && *partial <= INT_MAX)
            each((int)*partial, context);
        *partial = 0;
    }
    return lines;
}

/* The name, in parentheses, is the process's own to choose. */
int parent_parse(const char *text, bool *forked) {
    int ppid = 0;
    unsigned flags = 0;
    const char *name_end = strrchr(text, ')');
    *forked = false;
    if (!name_end || sscanf(name_end, ") %*c %d %*d %*d %*d %*d %u", &ppid, &flags) != 2)
        return 0;
    *forked = flags & FORKED_NO_EXEC;
    return ppid;
}
