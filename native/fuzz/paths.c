/* Input: u8 dice for what fails, then a text: the path of a request, taken apart in both ways, and the name that the kernel gives an
 * open file, which is a process's own to choose as far as directories can be renamed. */
#include "../paths.h"
#include "../requests.h"
#include "fuzz.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#define FIRST_FD 100
#define FDS_MAX 8
#define PROC_MAGIC 0x9fa0

/* ---- the fake ---- */

static bool is_open[FDS_MAX], failing;
static uint32_t state;
static int newest;
static const char *kernel_name; /* of what is open; NULL: it is no file of procfs */
static char walked[2 * PATH_LIMIT];

static bool fails(int error) {
    errno = error;
    return failing && dice(&state, 8) == 0;
}

static int open_fd(void) {
    for (newest = 0; newest < FDS_MAX; newest++)
        if (!is_open[newest]) {
            is_open[newest] = true;
            return FIRST_FD + newest;
        }
    HOLDS(!"too many open files");
    return -1;
}

static void check_fd(int fd) {
    HOLDS(fd >= FIRST_FD && fd < FIRST_FD + FDS_MAX && is_open[fd - FIRST_FD]);
}

int fake_openat2(int dir, const char *path, const struct open_how *how) {
    HOLDS(how->resolve == RESOLVE_NO_MAGICLINKS && how->flags & O_CLOEXEC && !how->mode);
    HOLDS(how->flags & O_PATH || (how->flags & O_NONBLOCK && how->flags & O_NOCTTY));
    if (dir != AT_FDCWD) {
        check_fd(dir);
        HOLDS(*path && !strchr(path, '/') && strlen(path) <= NAME_MAX);
    }
    if (fails(EACCES) || (dir != AT_FDCWD && fails(ENOENT)))
        return -1;
    strcat(walked, path);
    strcat(walked, dir == AT_FDCWD ? "" : "/");
    return open_fd();
}

int fake_fstatfs(int fd, struct statfs *fs) {
    check_fd(fd);
    fs->f_type = kernel_name ? PROC_MAGIC : 1;
    return fails(EIO) ? -1 : 0;
}

ssize_t fake_readlink(const char *link, char *into, size_t room) {
    char own[32];
    snprintf(own, sizeof own, "/proc/self/fd/%d", FIRST_FD + newest);
    HOLDS(!strcmp(link, own));
    if (fails(EACCES))
        return -1;
    const char *name = kernel_name ? kernel_name : "/somewhere";
    size_t size = strlen(name) < room ? strlen(name) : room;
    memcpy(into, name, size);
    return (ssize_t)size;
}

int fake_mkdirat(int dir, const char *name, mode_t mode) {
    check_fd(dir);
    HOLDS(*name && !strchr(name, '/') && strlen(name) <= NAME_MAX && mode == 0755);
    return fails(dice(&state, 2) ? EEXIST : EROFS) ? -1 : 0;
}

int fake_close(int fd) {
    check_fd(fd);
    is_open[fd - FIRST_FD] = false;
    return 0;
}

/* ---- what must come of it ---- */

static void nothing_open(void) {
    for (int i = 0; i < FDS_MAX; i++)
        HOLDS(!is_open[i]);
}

static bool is_longer_than_a_name(const char *part) {
    return strcspn(part, "/") > NAME_MAX;
}

static void check_open_parent(const char *path) {
    char base[NAME_MAX + 1];
    const char *last = strrchr(path, '/') + 1;
    bool none = !*last || !strcmp(last, ".") || !strcmp(last, "..");
    walked[0] = 0;
    int fd = open_parent(path, base);
    if (fd < 0) {
        HOLDS(failing || none || strlen(last) > NAME_MAX);
        return;
    }
    HOLDS(!none && !strcmp(base, last));
    HOLDS(strlen(walked) == (size_t)(last - path) && !memcmp(walked, path, strlen(walked)));
    fake_close(fd);
}

/* Every component above the last, one after another and no more than one slash apart. */
static void check_make_parents(const char *path) {
    char above[PATH_LIMIT + 1] = "/";
    bool fits = true;
    const char *last = strrchr(path, '/') + 1;
    for (const char *at = path; at < last; at += strcspn(at, "/") + 1)
        if (*at != '/') {
            fits &= !is_longer_than_a_name(at);
            strncat(above, at, strcspn(at, "/") + 1);
        }
    walked[0] = 0;
    if (make_parents(path))
        HOLDS(failing || !fits);
    else
        HOLDS(fits && !strcmp(walked, above));
}

static bool has_number(const char *name) {
    char copy[PATH_LIMIT];
    strcpy(copy, name);
    for (char *save, *part = strtok_r(copy, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
        bool digits = true;
        for (const char *c = part; *c; c++)
            digits &= *c >= '0' && *c <= '9';
        if (digits)
            return true;
    }
    return false;
}

/* No file of a process may be opened; when the kernel does not say what it is, it may be one. */
static void check_kernel_name(const char *name) {
    kernel_name = name;
    walked[0] = 0;
    int fd = open_path(AT_FDCWD, "x", O_RDONLY, 0600);
    HOLDS(fd < 0 ? failing || (errno == EACCES && has_number(name)) : !has_number(name));
    if (fd >= 0)
        fake_close(fd);
    kernel_name = NULL;
}

static void check(const char *text) {
    check_kernel_name(text);
    nothing_open();
    if (*text != '/')
        return;
    check_open_parent(text);
    nothing_open();
    check_make_parents(text);
    nothing_open();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (!size || size > PATH_LIMIT || memchr(data + 1, 0, size - 1))
        return 0;
    state = data[0];
    failing = state & 1;
    char *text = malloc(size);
    HOLDS(text);
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    check(text);
    free(text);
    return 0;
}

static void exchange(uint8_t *data, size_t size, uint8_t from, uint8_t to) {
    for (size_t i = 0; i < size; i++)
        data[i] = data[i] == from ? to : data[i];
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t dices = seed;
    if (size < 2 || dice(&dices, 2))
        return LLVMFuzzerMutate(data, size, most);
    exchange(data + 1, size - 1, '/', '\t');
    size = 1 + mutate_fields(data + 1, size - 1, most - 1, &dices);
    exchange(data + 1, size - 1, '\t', '/');
    return size;
}
