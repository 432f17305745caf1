/* Input: the text of /proc/<pid>/status, a 0x01 byte, what its cmdline holds. The whole is taken as a cgroup.procs file and as
 * a /proc/<pid>/stat, too, and what comes before the mark as the name in one. */
#include "../groups.h"
#include "../tasks.h"
#include "fuzz.h"

/* What the host reads back must be what was there, argument by argument. */
static void check_argv(struct reader *r, const char *argv, size_t size) {
    uint32_t count = get_u32(r);
    for (uint32_t i = 0; i < count; i++) {
        struct span one = get_bytes(r);
        HOLDS(!r->bad && one.size <= size && (one.size == 0 || !memcmp(one.data, argv, one.size)));
        argv += one.size;
        size -= one.size;
        HOLDS(!size || !*argv);
        argv += size > 0;
        size -= size > 0;
    }
    HOLDS(!size && !r->bad && !reader_left(r));
}

static void check_process(const char *status, const char *argv, size_t size) {
    uint8_t *record = malloc(PROCESS_MAX);
    HOLDS(record);
    struct writer w = writer_of(record, PROCESS_MAX);
    process_put(&w, 7, 9, status, argv, size);
    HOLDS(!w.full);
    struct reader r = reader_of(record, (size_t)(w.at - record));
    HOLDS(get_u32(&r) == 7);
    get_u64(&r);
    HOLDS(get_u32(&r) <= 0xff);
    get_u64(&r);
    HOLDS(get_u64(&r) == 9);
    check_argv(&r, argv, size);
    free(record);
}

struct found {
    uint32_t count;
    uint64_t sum;
};

static void add(int pid, void *context) {
    struct found *found = context;
    HOLDS(pid > 0);
    found->count++;
    found->sum = found->sum * 31 + (unsigned)pid;
}

static void check_pids(const char *text, size_t size) {
    struct found whole = {0}, pieces = {0};
    uint32_t partial = 0, lines = pids_parse(text, size, &partial, add, &whole);
    HOLDS(lines >= whole.count && lines <= size && pids_parse(text, 0, &partial, NULL, NULL) == 0);
    partial = 0;
    for (size_t i = 0; i < size; i++)
        pids_parse(text + i, 1, &partial, add, &pieces);
    HOLDS(whole.count == pieces.count && whole.sum == pieces.sum);
}

/* Whatever a process calls itself, it must not choose its parent. */
static void check_parent(const char *name, unsigned flags) {
    char text[512];
    bool forked, all;
    snprintf(text, sizeof text, "7 (%.64s) S 41 7 7 0 -1 %u 100 0 0", name, flags);
    HOLDS(parent_parse(text, &forked) == 41 && forked == ((flags & 0x40) != 0));
    HOLDS(parent_parse(name, &all) == 0 || strchr(name, ')'));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *mark = size ? memchr(data, 1, size) : NULL;
    size_t head = mark ? (size_t)(mark - data) : size, rest = mark ? size - head - 1 : 0;
    char *status = malloc(head + 1);
    HOLDS(status);
    if (head)
        memcpy(status, data, head);
    status[head] = 0;
    check_parent(status, (unsigned)size);
    if (rest < ARGV_MAX)
        check_process(status, mark ? (const char *)mark + 1 : "", rest);
    free(status);
    check_pids((const char *)data, size);
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t state = seed;
    return dice(&state, 2) ? LLVMFuzzerMutate(data, size, most) : mutate_fields(data, size, most, &state);
}
