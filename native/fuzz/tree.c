/* Input: u8 seed, u8 number of the call that fails (0: none), then the tree stream of a PUT_TREE. The stream is taken whole and
 * once more in pieces; both must make the same files, also when it is malformed, and leave no other: a file is seen whole or not
 * at all. The file system is a fake that believes in names only: one component, of a directory below the root, never through a
 * link. */
#include "../paths.h"
#include "../tasks.h"
#include "../temporary.h"
#include "fuzz.h"

#include <errno.h>

#undef close /* a member of struct task, too */

#define FIRST_FD 1000
#define NODES_MAX 64
#define FDS_MAX 16

/* ---- the fake ---- */

struct node {
    int parent; /* -1: there is no such node (any more) */
    char kind, name[NAME_MAX + 1];
    bool named; /* by the stream, not only by the guest */
    uint64_t digest, size;
};

static struct node nodes[NODES_MAX];
static int open_nodes[FDS_MAX], node_count, open_count;
static uint32_t state, calls_left;
static uint64_t names_given;
static bool kept; /* a removal failed: what it was for stays */

static bool fails(int error) {
    errno = error;
    return calls_left && --calls_left == 0;
}

static int add_node(int parent, const char *name, char kind) {
    if (node_count == NODES_MAX) {
        errno = ENOSPC;
        return -1;
    }
    struct node *node = &nodes[node_count];
    *node = (struct node){.parent = parent, .kind = kind};
    memcpy(node->name, name, strlen(name));
    return node_count++;
}

static int open_node(int node) {
    for (int i = 0; i < FDS_MAX; i++)
        if (open_nodes[i] < 0) {
            open_nodes[i] = node;
            open_count++;
            return FIRST_FD + i;
        }
    HOLDS(!"too many open files");
    return -1;
}

static int node_of(int fd, char kind) {
    HOLDS(fd >= FIRST_FD && fd < FIRST_FD + FDS_MAX && open_nodes[fd - FIRST_FD] >= 0);
    int node = open_nodes[fd - FIRST_FD];
    HOLDS(!kind || nodes[node].kind == kind);
    return node;
}

static void check_name(const char *name) {
    size_t size = strlen(name);
    HOLDS(size > 0 && size <= NAME_MAX && !strchr(name, '/') && strcmp(name, ".") && strcmp(name, ".."));
}

static int find(int dir, const char *name) {
    check_name(name);
    int parent = node_of(dir, 'd');
    for (int i = 1; i < node_count; i++)
        if (nodes[i].parent == parent && !strcmp(nodes[i].name, name))
            return i;
    errno = ENOENT;
    return -1;
}

int open_path(int dir, const char *path, int flags, unsigned mode) {
    (void)mode;
    if (dir == AT_FDCWD)
        return open_node(0);
    HOLDS(flags == (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW));
    if (fails(EACCES))
        return -1;
    if (find(dir, path) >= 0) {
        errno = EEXIST;
        return -1;
    }
    int node = add_node(node_of(dir, 'd'), path, 'f');
    return node < 0 ? -1 : open_node(node);
}

int open_child_directory(int dir, const char *name) {
    int node = find(dir, name);
    if (node < 0 || fails(EACCES))
        return -1;
    errno = nodes[node].kind == 'l' ? ELOOP : ENOTDIR;
    return nodes[node].kind == 'd' ? open_node(node) : -1;
}

int make_parents(const char *path) {
    (void)path;
    return 0;
}

int fake_fcntl(int fd, int command, int argument) {
    HOLDS(command == F_DUPFD_CLOEXEC && argument == 0);
    return open_node(node_of(fd, 0));
}

int fake_close(int fd) {
    node_of(fd, 0);
    open_nodes[fd - FIRST_FD] = -1;
    open_count--;
    errno = 0;
    return 0;
}

int fake_mkdirat(int dir, const char *name, mode_t mode) {
    HOLDS(mode == 0700);
    if (fails(EACCES))
        return -1;
    bool exists = find(dir, name) >= 0;
    errno = EEXIST;
    int node = exists ? -1 : add_node(node_of(dir, 'd'), name, 'd');
    if (node >= 0)
        nodes[node].named = true;
    return node < 0 ? -1 : 0;
}

int fake_unlinkat(int dir, const char *name, int flags) {
    HOLDS(flags == 0);
    if (fails(EACCES)) {
        kept = true;
        return -1;
    }
    int node = find(dir, name);
    HOLDS(node >= 0 && nodes[node].kind != 'd');
    nodes[node].parent = -1;
    return 0;
}

int fake_renameat(int from_dir, const char *from, int to_dir, const char *to) {
    int node = find(from_dir, from), old = find(to_dir, to);
    HOLDS(node >= 0 && nodes[node].kind != 'd' && node_of(from_dir, 'd') == node_of(to_dir, 'd'));
    if (fails(EACCES))
        return -1;
    errno = EISDIR;
    if (old >= 0 && nodes[old].kind == 'd')
        return -1;
    if (old >= 0)
        nodes[old].parent = -1;
    strcpy(nodes[node].name, to);
    nodes[node].named = true;
    return 0;
}

int fake_fstatat(int dir, const char *name, struct stat *st, int flags) {
    HOLDS(flags == AT_SYMLINK_NOFOLLOW);
    if (fails(EACCES))
        return -1;
    int node = find(dir, name);
    if (node < 0)
        return -1;
    st->st_mode = nodes[node].kind == 'd' ? S_IFDIR : nodes[node].kind == 'l' ? S_IFLNK : S_IFREG;
    return 0;
}

ssize_t fake_getrandom(void *into, size_t size, unsigned flags) {
    HOLDS(size == sizeof names_given && flags == 0);
    if (fails(EINTR))
        return -1;
    names_given++;
    memcpy(into, &names_given, size);
    return (ssize_t)size;
}

static void mix(struct node *node, uint64_t value) {
    node->digest = (node->digest ^ value) * 1099511628211u;
}

int fake_symlinkat(const char *target, int dir, const char *name) {
    HOLDS(*target && strlen(target) < PATH_LIMIT);
    if (fails(EACCES))
        return -1;
    if (find(dir, name) >= 0) {
        errno = EEXIST;
        return -1;
    }
    int node = add_node(node_of(dir, 'd'), name, 'l');
    if (node < 0)
        return -1;
    for (; *target; target++)
        mix(&nodes[node], (uint8_t)*target);
    return 0;
}

static int change(int node, uint64_t a, uint64_t b) {
    if (fails(EPERM))
        return -1;
    HOLDS(node >= 0);
    mix(&nodes[node], a);
    mix(&nodes[node], b);
    return 0;
}

static int change_times(int node, const struct timespec times[2]) {
    HOLDS(times[0].tv_nsec == UTIME_OMIT && times[1].tv_nsec >= 0 && times[1].tv_nsec < 1000000000);
    return change(node, (uint64_t)times[1].tv_sec, (uint64_t)times[1].tv_nsec);
}

int fake_fchownat(int dir, const char *name, uid_t uid, gid_t gid, int flags) {
    HOLDS(flags == AT_SYMLINK_NOFOLLOW);
    return change(find(dir, name), uid, gid);
}

int fake_utimensat(int dir, const char *name, const struct timespec times[2], int flags) {
    HOLDS(flags == AT_SYMLINK_NOFOLLOW);
    return change_times(find(dir, name), times);
}

int fake_fchown(int fd, uid_t uid, gid_t gid) {
    return change(node_of(fd, 0), uid, gid);
}

int fake_fchmod(int fd, mode_t mode) {
    HOLDS((mode & ~07777u) == 0);
    return change(node_of(fd, 0), mode, 0);
}

int fake_futimens(int fd, const struct timespec times[2]) {
    return change_times(node_of(fd, 0), times);
}

ssize_t fake_writev(int fd, const struct iovec *piece, int count) {
    struct node *node = &nodes[node_of(fd, 'f')];
    if (fails(ENOSPC))
        return -1;
    size_t most = 1 + dice(&state, 5000), taken = 0;
    for (int i = 0; i < count; i++)
        for (size_t j = 0; j < piece[i].iov_len && taken < most; j++, taken++)
            mix(node, ((const uint8_t *)piece[i].iov_base)[j]);
    node->size += taken;
    return (ssize_t)taken;
}

/* ---- what the task needs of the guest ---- */

void *task_new(struct op *op, size_t size, bool (*step)(struct op *), void (*close_)(struct op *)) {
    (void)op;
    struct task *task = calloc(1, size);
    HOLDS(task);
    task->step = step;
    task->close = close_;
    return task;
}

void op_fail(struct op *op, int error, const char *step) {
    HOLDS(error > 0 && step);
    op->done = true;
    op->result.code = error;
}

void task_done(struct op *op) {
    op->done = true;
}

/* ---- one stream ---- */

static void reset_files(uint32_t failing) {
    node_count = open_count = 0;
    calls_left = failing;
    names_given = 0;
    kept = false;
    for (int i = 0; i < FDS_MAX; i++)
        open_nodes[i] = -1;
    add_node(-1, "", 'd');
    add_node(0, "dir", 'd');
    add_node(0, "link", 'l');
    add_node(0, "file", 'f');
}

static void run(struct op *op, struct task *task, const uint8_t *data, size_t size, bool pieces) {
    size_t steps = 8 * size + 1000;
    for (size_t at = 0; !op->done;) {
        size_t room = ring_room(&op->in.ring), next = pieces ? 1 + dice(&state, 40) : room;
        next = next < size - at ? next : size - at;
        next = next < room ? next : room;
        HOLDS(ring_append(&op->in.ring, data + at, (uint32_t)next));
        at += next;
        op->in.eof = at == size;
        while (!op->done && task->step(op))
            HOLDS(steps-- > 0);
        HOLDS(op->done || !op->in.eof);
    }
}

/* Of what is seen in the end. Names that the guest gave are gone by then. */
static uint64_t digest_of_files(void) {
    uint64_t digest = 0;
    for (int i = 0; i < node_count; i++) {
        if (nodes[i].parent < 0 && i)
            continue;
        for (uint64_t given = 1; given <= names_given && !kept; given++) {
            char name[TEMPORARY_MAX];
            snprintf(name, sizeof name, ".barchan-%016llx", (unsigned long long)given);
            HOLDS(strcmp(nodes[i].name, name) || nodes[i].named);
        }
        digest = (digest ^ nodes[i].digest ^ nodes[i].size) * 1099511628211u;
        for (const char *at = nodes[i].name; *at; at++)
            digest = (digest ^ (uint8_t)*at) * 1099511628211u;
    }
    return digest;
}

/* Returns the errno with which the stream ended, 0 if well, and what it made. */
static int put(const uint8_t *data, size_t size, bool pieces, uint32_t failing, uint64_t *made) {
    struct op op = {.in.ring.max = INPUT_KEPT};
    static const struct request request = {.kind = OP_PUT_TREE, .path = "/root", .uid = KEEP, .gid = KEEP};
    reset_files(failing);
    struct task *task = put_tree_task(&op, &request);
    HOLDS(task);
    op.state = task;
    run(&op, task, data, size, pieces);
    task->close(&op);
    free(task);
    ring_release(&op.in.ring);
    HOLDS(open_count == 0);
    *made = digest_of_files();
    return op.result.code;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    uint64_t whole, pieces;
    if (size < 2)
        return 0;
    state = data[0];
    int error = put(data + 2, size - 2, false, data[1], &whole);
    int again = put(data + 2, size - 2, true, data[1], &pieces);
    HOLDS(data[1] || (error == again && whole == pieces));
    return 0;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    uint32_t dices = seed;
    if (size < 3 || dice(&dices, 2))
        return LLVMFuzzerMutate(data, size, most);
    return 2 + mutate_counted(data + 2, size - 2, most - 2, &dices);
}
