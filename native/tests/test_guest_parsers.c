/* Frames, requests, tree items and account files: whole, cut short, too long, lying about lengths, and mutated at random.
 * Every buffer is a fresh allocation of exactly its size, so that ASan sees one byte too far. FUZZ_SECONDS: how long. */
#include "../identity.h"
#include "../link_parse.h"
#include "../requests.h"
#include "../tasks.h"
#include "check.h"

#include <time.h>
#include <unistd.h>

static uint8_t *exact(const void *data, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    CHECK(copy);
    if (size)
        memcpy(copy, data, size);
    return copy;
}

/* ---- frames ---- */

static size_t make_frame(uint8_t *into, uint8_t type, uint8_t stream, const void *payload, uint32_t size) {
    frame_head(into, size, type, stream, 7);
    if (size)
        memcpy(into + FRAME_HEAD, payload, size);
    return FRAME_HEAD + size;
}

static bool parses(uint8_t type, uint8_t stream, const void *payload, uint32_t size) {
    uint8_t frame[256];
    struct frame f;
    size_t whole = make_frame(frame, type, stream, payload, size);
    uint8_t *copy = exact(frame, whole);
    CHECK(frame_size(copy, whole) == (long)whole);
    bool fine = frame_parse(copy, whole, &f);
    CHECK(!fine || (f.id == 7 && f.type == type));
    free(copy);
    return fine;
}

static void test_frame_heads(void) {
    uint8_t head[FRAME_HEAD];
    frame_head(head, 5, F_PING, 0, 1);
    for (size_t n = 0; n < FRAME_HEAD; n++) {
        uint8_t *copy = exact(head, n);
        CHECK(frame_size(copy, n) == 0);
        free(copy);
    }
    CHECK(frame_size(head, sizeof head) == FRAME_HEAD + 5);
    frame_head(head, FRAME_MAX_PAYLOAD + 1, F_PING, 0, 1);
    CHECK(frame_size(head, sizeof head) == -1);
    frame_head(head, FRAME_MAX_PAYLOAD, F_PING, 0, 1);
    CHECK(frame_size(head, sizeof head) == (long)(FRAME_HEAD + FRAME_MAX_PAYLOAD));
    head[6] = 1;
    CHECK(frame_size(head, sizeof head) == -1);
}

static void test_frame_fields(void) {
    const uint8_t zero[80] = {0};
    const uint8_t signal65[8] = {65}, scope2[8] = {9, 0, 0, 0, 2}, start_reserved[4] = {1, 1};
    CHECK(parses(F_HELLO, 0, zero, 4) && !parses(F_HELLO, 0, zero, 3) && !parses(F_HELLO, 0, zero, 5));
    CHECK(parses(F_DATA, 0, zero, 8) && parses(F_DATA, 0, zero, 80) && !parses(F_DATA, 0, zero, 7));
    CHECK(!parses(F_DATA, 1, zero, 8) && !parses(F_EOF, 2, zero, 16));
    CHECK(parses(F_EOF, 0, zero, 16) && !parses(F_EOF, 0, zero, 15) && !parses(F_EOF, 0, zero, 17));
    CHECK(parses(F_ACK, 1, zero, 8) && parses(F_CREDIT, 2, zero, 8));
    CHECK(!parses(F_ACK, 0, zero, 8) && !parses(F_CREDIT, 3, zero, 8) && !parses(F_CREDIT, 1, zero, 9));
    CHECK(parses(F_SIGNAL, 0, zero, 8) && !parses(F_SIGNAL, 0, signal65, 8) && !parses(F_SIGNAL, 0, scope2, 8));
    CHECK(parses(F_RESIZE, 0, zero, 4) && !parses(F_RESIZE, 0, zero, 3) && !parses(F_RESIZE, 0, zero, 5));
    CHECK(parses(F_PING, 0, zero, 64) && !parses(F_PING, 0, zero, 65));
    CHECK(parses(F_START, 0, zero, 4) && !parses(F_START, 0, start_reserved, 4) && !parses(F_START, 0, zero, 3));
    CHECK(parses(F_CANCEL, 0, zero, 0) && !parses(F_CANCEL, 0, zero, 1));
    CHECK(!parses(F_WELCOME, 0, zero, 24) && !parses(0, 0, zero, 0) && !parses(0xff, 0, zero, 0));
}

/* ---- requests ---- */

static void put_text(struct writer *w, const char *text) {
    put_bytes(w, text, (uint32_t)strlen(text));
}

static size_t exec_request(uint8_t *into, size_t room, const char *env) {
    struct writer w = writer_of(into, room);
    put_text(&w, "bob:wheel");
    put_u32(&w, EXEC_STDIN | EXEC_MERGE);
    put_u32(&w, 1000);
    put_u32(&w, 10);
    put_u64(&w, 1u << 20);
    put_u32(&w, 64);
    put_u32(&w, 24u | 80u << 16);
    put_text(&w, "work");
    put_u32(&w, 2);
    put_text(&w, "sh");
    put_text(&w, "");
    put_u32(&w, 1);
    put_text(&w, env);
    CHECK(!w.full);
    return (size_t)(w.at - into);
}

static bool accepts(uint8_t kind, const uint8_t *data, size_t size, struct request *r) {
    uint8_t *copy = exact(data, size);
    bool fine = request_parse(kind, (struct span){copy, (uint32_t)size}, r);
    free(copy);
    return fine;
}

static void test_exec_request(void) {
    uint8_t data[512];
    struct request r;
    size_t size = exec_request(data, sizeof data, "A=b=c");
    CHECK(accepts(OP_EXEC, data, size, &r));
    CHECK(!strcmp(r.user, "bob:wheel") && !strcmp(r.path, "/work") && r.argc == 2 && r.envc == 1);
    CHECK(!strcmp(r.argv[0], "sh") && !*r.argv[1] && !r.argv[2] && !strcmp(r.env[0], "A=b=c") && !r.env[1]);
    CHECK(r.timeout_ms == 1000 && r.grace_ms == 10 && r.output_limit == 1u << 20 && r.nofile == 64 && r.rows == 24 && r.columns == 80);
    request_release(&r);
    for (size_t n = 0; n < size; n++)
        CHECK(!accepts(OP_EXEC, data, n, &r));
    data[size] = 0;
    CHECK(!accepts(OP_EXEC, data, size + 1, &r));
    CHECK(!accepts(OP_EXEC, data, exec_request(data, sizeof data, "no equals sign"), &r));
    CHECK(!accepts(OP_EXEC, data, exec_request(data, sizeof data, "=x"), &r));
    size = exec_request(data, sizeof data, "A=b");
    data[13] = 0x80; /* unknown flag */
    CHECK(!accepts(OP_EXEC, data, size, &r));
    CHECK(!accepts(0, data, size, &r) && !accepts(12, data, size, &r) && !accepts(255, data, size, &r));
}

static bool accepts_flags(uint32_t flags, uint32_t arguments) {
    uint8_t data[256];
    struct request r;
    struct writer w = writer_of(data, sizeof data);
    put_text(&w, "");
    put_u32(&w, flags);
    for (int i = 0; i < 6; i++)
        put_u32(&w, 0); /* times, output limit, open files, size */
    put_text(&w, "");
    put_u32(&w, arguments);
    for (uint32_t i = 0; i < arguments; i++)
        put_text(&w, "sh");
    put_u32(&w, 0);
    CHECK(!w.full);
    bool fine = accepts(OP_EXEC, data, (size_t)(w.at - data), &r);
    if (fine)
        request_release(&r);
    return fine;
}

static void test_exec_flags(void) {
    CHECK(accepts_flags(0, 1) && !accepts_flags(0, 0));
    CHECK(accepts_flags(EXEC_TTY | EXEC_STDIN, 1) && !accepts_flags(EXEC_TTY, 0));
    CHECK(accepts_flags(EXEC_SHELL, 0) && accepts_flags(EXEC_SHELL | EXEC_MERGE, 1));
    CHECK(!accepts_flags(EXEC_SHELL | EXEC_TTY, 1) && !accepts_flags(EXEC_SHELL | EXEC_STDIN, 1) && !accepts_flags(32, 1));
}

static size_t run_request(uint8_t *into, size_t room, const char *command, uint32_t size) {
    struct writer w = writer_of(into, room);
    put_text(&w, "");
    put_u64(&w, 1ull << 40);
    put_u32(&w, 1000);
    put_u32(&w, 10);
    put_u64(&w, 77);
    put_bytes(&w, command, size);
    CHECK(!w.full);
    return (size_t)(w.at - into);
}

static void test_run_request(void) {
    uint8_t data[128];
    struct request r;
    size_t size = run_request(data, sizeof data, "a\nb", 3);
    CHECK(accepts(OP_RUN, data, size, &r));
    CHECK(r.shell == 1ull << 40 && r.timeout_ms == 1000 && r.grace_ms == 10 && r.output_limit == 77 && !strcmp(r.command, "a\nb"));
    request_release(&r);
    for (size_t n = 0; n < size; n++)
        CHECK(!accepts(OP_RUN, data, n, &r));
    data[size] = 0;
    CHECK(!accepts(OP_RUN, data, size + 1, &r));
    CHECK(!accepts(OP_RUN, data, run_request(data, sizeof data, "a\0b", 3), &r));
    CHECK(accepts(OP_RUN, data, run_request(data, sizeof data, "", 0), &r) && !*r.command);
    request_release(&r);
}

static void test_lists(void) {
    uint32_t count;
    uint8_t huge[8] = {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0}, nul[10] = {1, 0, 0, 0, 2, 0, 0, 0, 'a', 0};
    struct reader r = reader_of(huge, sizeof huge);
    CHECK(!get_strings(&r, &count) && r.bad);
    r = reader_of(nul, sizeof nul);
    CHECK(!get_strings(&r, &count) && r.bad);
    uint8_t empty[4] = {0};
    r = reader_of(empty, sizeof empty);
    char **none = get_strings(&r, &count);
    CHECK(none && !*none && count == 0 && !r.bad);
    free(none);
}

static void test_paths(void) {
    static uint8_t data[3 * PATH_LIMIT];
    static char longest[PATH_LIMIT];
    struct request r;
    for (int extra = 0; extra < 2; extra++) {
        memset(longest, 'x', sizeof longest);
        longest[0] = '/';
        longest[PATH_LIMIT - 1] = 0;
        struct writer w = writer_of(data, sizeof data);
        put_text(&w, "");
        put_bytes(&w, longest + (extra ? 1 : 0), PATH_LIMIT - 1); /* without its slash one has to be added */
        put_u8(&w, 1);
        CHECK(accepts(OP_STAT, data, (size_t)(w.at - data), &r) == !extra);
    }
}

/* ---- tree items ---- */

static size_t make_entry(uint8_t *into, size_t room, const char *path, mode_t mode, const char *target) {
    struct stat st = {.st_mode = mode, .st_size = 5, .st_nlink = 1, .st_mtim = {-2, 5}};
    struct writer w = writer_of(into, room);
    entry_put(&w, path, entry_kind(st.st_mode), &st, target);
    CHECK(!w.full);
    return (size_t)(w.at - into);
}

static void test_entries(void) {
    uint8_t data[256];
    struct entry e;
    size_t size = make_entry(data, sizeof data, "a/b", S_IFLNK | 0777, "../x");
    CHECK(entry_parse(data, size, &e) == (long)size);
    CHECK(e.kind == 'l' && e.mode == 0777 && e.path.size == 3 && e.target.size == 4 && e.mtime_ns == -1999999995);
    for (size_t n = 0; n < size; n++) {
        uint8_t *copy = exact(data, n);
        CHECK(entry_parse(copy, n, &e) == 0);
        free(copy);
    }
    uint8_t kind = data[4 + 3];
    data[4 + 3] = 'z';
    CHECK(entry_parse(data, size, &e) == -1);
    data[4 + 3] = kind;
    data[1] = 0xff; /* a path longer than any: refused before it is there */
    CHECK(entry_parse(data, 8, &e) == -1);
}

static bool safe(const char *path) {
    size_t size = strlen(path);
    uint8_t *copy = exact(path, size);
    bool fine = entry_path_is_safe((struct span){copy, (uint32_t)size});
    free(copy);
    return fine;
}

static void test_safe_paths(void) {
    char name[260];
    memset(name, 'n', sizeof name);
    name[255] = 0;
    CHECK(safe("a") && safe("a/b") && safe("..a") && safe("a/...") && safe(name));
    name[255] = 'n';
    name[256] = 0;
    CHECK(!safe("") && !safe("/") && !safe("/a") && !safe("a/") && !safe("a//b") && !safe(".") && !safe("..") && !safe(name));
    CHECK(!safe("a/..") && !safe("../a") && !safe("a/./b") && !safe("a/../b"));
    CHECK(!entry_path_is_safe((struct span){(const uint8_t *)"a\0b", 3}));
}

/* ---- accounts ---- */

static const char passwd[] = "root:x:0:0:root:/root:/bin/sh\n\nbroken\nbad:x:99999999999:1:::\n"
                             "bob:x:1000:1001::/home/bob:/bin/sh\n1005:x:7:8::/odd:\nlast:x:5:5::/l:";
static const char group[] = "root:x:0:\nwheel:x:10:bob,ann\nbobs:x:12:bobby,xbob\nusers:x:100:ann,bob\nempty:x:11:";

static void test_passwd(void) {
    struct account a = {0};
    uint8_t *data = exact(passwd, sizeof passwd - 1);
    const char *text = (const char *)data;
    size_t size = sizeof passwd - 1;
    CHECK(passwd_find(text, size, "bob", &a) && a.who.uid == 1000 && a.who.gid == 1001 && !strcmp(a.home, "/home/bob"));
    CHECK(passwd_find(text, size, "1000", &a) && !strcmp(a.name, "bob"));
    CHECK(passwd_find(text, size, "1005", &a) && a.who.uid == 7); /* a name first, a number second */
    CHECK(passwd_find(text, size, "last", &a) && a.who.uid == 5);
    memset(&a, 0, sizeof a);
    CHECK(passwd_find(text, size, "4242", &a) && a.who.uid == 4242 && a.who.gid == 0 && !a.name[0]);
    CHECK(!passwd_find(text, size, "nobody", &a) && !passwd_find(text, size, "bad", &a) && !passwd_find(text, size, "", &a));
    CHECK(passwd_find("broken", 6, "root", &a) && a.who.uid == 0 && a.who.gid == 0 && !strcmp(a.home, "/"));
    CHECK(passwd_find("toor:x:0:3::/r:", 15, "root", &a) && a.who.gid == 3 && !strcmp(a.home, "/r") && !strcmp(a.name, "toor"));
    CHECK(!passwd_find(text, size, "4294967295", &a) && !passwd_find(text, size, "-1", &a));
    free(data);
}

static void test_groups(void) {
    struct identity who = {0};
    uint32_t gid;
    uint8_t *data = exact(group, sizeof group - 1);
    const char *text = (const char *)data;
    CHECK(groups_of(text, sizeof group - 1, "bob", &who) && who.count == 2 && who.groups[0] == 10 && who.groups[1] == 100);
    identity_release(&who);
    CHECK(group_find(text, sizeof group - 1, "empty", &gid) && gid == 11);
    CHECK(group_find(text, sizeof group - 1, "77", &gid) && gid == 77);
    CHECK(!group_find(text, sizeof group - 1, "nosuch", &gid));
    CHECK(group_find("", 0, "root", &gid) && gid == 0);
    free(data);
}

/* ---- rings ---- */

static void test_ring(void) {
    struct ring ring = {.max = 1u << 18};
    uint8_t *data = malloc(1u << 18), *back = malloc(1u << 18);
    CHECK(data && back);
    uint64_t in = 0, out = 0;
    for (unsigned round = 0; round < 4000; round++) {
        uint32_t size = (round * 7919u) % 9000u;
        for (uint32_t i = 0; i < size; i++)
            data[i] = (uint8_t)((in + i) * 31u);
        if (ring_append(&ring, data, size))
            in += size;
        else
            CHECK(size > ring_room(&ring));
        uint32_t got = ring_peek(&ring, back, (round * 104729u) % 8000u);
        for (uint32_t i = 0; i < got; i++)
            CHECK(back[i] == (uint8_t)((out + i) * 31u));
        ring_consume(&ring, got);
        out += got;
        CHECK(ring.used == in - out && ring.cap <= ring.max);
    }
    CHECK(!ring_append(&ring, data, ring.max + 1));
    ring_release(&ring);
    free(data);
    free(back);
}

/* Through a pipe from one ring to another, in sizes that make both wrap. */
static void test_ring_transfer(void) {
    struct ring from = {.max = RING_MIN}, to = {.max = RING_MIN};
    uint8_t data[8000], back[8000];
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (unsigned round = 0; round < 500; round++) {
        uint32_t size = 1 + (round * 7919u) % sizeof data;
        for (uint32_t i = 0; i < size; i++)
            data[i] = (uint8_t)(i * 31u + round);
        CHECK(ring_append(&from, data, size) && ring_reserve(&to, RING_MIN));
        CHECK(ring_write(&from, ends[1], size + 100) == (ssize_t)size && from.used == 0);
        for (uint32_t got = 0; got < size; got += 3000u)
            CHECK(ring_read(&to, ends[0], 3000) == (ssize_t)(size - got < 3000u ? size - got : 3000u));
        CHECK(to.used == size && ring_peek(&to, back, size) == size && !memcmp(back, data, size));
        ring_consume(&to, size);
        to.head = (to.head + round) & (to.cap - 1);
        from.head = (from.head + 2 * round) & (from.cap - 1);
    }
    ring_release(&from);
    ring_release(&to);
    close(ends[0]);
    close(ends[1]);
}

/* ---- mutations ---- */

static uint32_t seed = 1;

static uint32_t dice(uint32_t sides) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % sides;
}

static void mutate(uint8_t *data, size_t size) {
    for (uint32_t n = dice(4); n-- && size;)
        data[dice((uint32_t)size)] = dice(3) ? (uint8_t)dice(256) : dice(2) ? 0xff : 0;
}

static void try_everything(const uint8_t *data, size_t size) {
    struct frame f;
    struct request r;
    struct entry e;
    struct account a = {0};
    uint32_t gid;
    uint8_t *copy = exact(data, size);
    long whole = frame_size(copy, size);
    if (whole > 0 && (size_t)whole <= size && frame_parse(copy, (size_t)whole, &f) && f.type == F_START &&
        request_parse(f.kind, f.payload, &r))
        request_release(&r);
    for (uint8_t kind = 0; kind < 13; kind++)
        if (request_parse(kind, (struct span){copy, (uint32_t)size}, &r))
            request_release(&r);
    long taken = entry_parse(copy, size, &e);
    CHECK(taken <= (long)size);
    if (taken > 0)
        entry_path_is_safe(e.path);
    passwd_find((char *)copy, size, "bob", &a);
    group_find((char *)copy, size, "wheel", &gid);
    groups_of((char *)copy, size, "bob", &a.who);
    identity_release(&a.who);
    free(copy);
}

static void fuzz(double seconds) {
    uint8_t seeds[4][512], work[512];
    size_t sizes[4];
    size_t size = exec_request(work, sizeof work, "K=V");
    uint8_t start[512] = {OP_EXEC};
    memcpy(start + 4, work, size);
    sizes[0] = make_frame(seeds[0], F_START, 0, start, (uint32_t)size + 4);
    memcpy(seeds[1], work, sizes[1] = size);
    sizes[2] = make_entry(seeds[2], sizeof seeds[2], "dir/name", S_IFREG | 0644, "");
    memcpy(seeds[3], passwd, sizes[3] = sizeof passwd - 1);
    clock_t end = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
    unsigned long rounds = 0;
    while (rounds < 20000 || clock() < end) {
        uint32_t which = dice(4);
        memcpy(work, seeds[which], sizes[which]);
        size = dice(8) ? sizes[which] : dice((uint32_t)sizes[which] + 1);
        mutate(work, size);
        try_everything(work, size);
        rounds++;
    }
    printf("%lu mutated inputs\n", rounds);
}

int main(void) {
    const char *seconds = getenv("FUZZ_SECONDS");
    test_frame_heads();
    test_frame_fields();
    test_exec_request();
    test_exec_flags();
    test_run_request();
    test_lists();
    test_paths();
    test_entries();
    test_safe_paths();
    test_passwd();
    test_groups();
    test_ring();
    test_ring_transfer();
    fuzz(seconds ? atof(seconds) : 0);
    return 0;
}
