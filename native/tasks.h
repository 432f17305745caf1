/* File operations that take more than one step. Each step runs under the caller's file identity and is short; between
 * steps the loop serves everybody else. */
#ifndef BARCHAN_TASKS_H
#define BARCHAN_TASKS_H
#include "guest.h"
#include "identity.h"

#include <sys/stat.h>

/* The most that one entry takes: head, path and link target. */
#define ENTRY_MAX (64u + 2 * PATH_LIMIT)

/* First member of each task's own struct; a task is one malloc'ed block. */
struct task {
    struct identity who;
    bool (*step)(struct op *op);  /* true: more to do now; false: waits for input or room, or the operation ended */
    void (*close)(struct op *op); /* once, under the same identity: gives back descriptors, removes what is half done */
};

struct entry {
    struct span path, target;
    uint32_t mode, uid, gid, nlink;
    uint64_t size;
    int64_t mtime_ns;
    uint8_t kind;
};

/* Constructors: NULL after op_fail. Under the caller's identity. */
struct task *read_task(struct op *op, const struct request *request);
struct task *write_task(struct op *op, const struct request *request);
struct task *remove_task(struct op *op, int parent, const char *name);
struct task *walk_task(struct op *op, const struct request *request);
struct task *put_tree_task(struct op *op, const struct request *request);
struct task *processes_task(struct op *op, const struct request *request);

/* Zeroed, `size` bytes, with those two functions; NULL after op_fail. */
void *task_new(struct op *op, size_t size, bool (*step)(struct op *), void (*close)(struct op *));

/* Output of a file operation. */
uint32_t task_room(const struct op *op);
bool task_emit(struct op *op, const void *data, uint32_t size);
/* The operation ends well. */
void task_done(struct op *op);

/* process_format.c, pure */
#define ARGV_MAX 4096u
/* Room for one process with ARGV_MAX bytes of arguments: each may be empty and still takes its count. */
#define PROCESS_MAX (64u + 5 * ARGV_MAX)
/* One record of PROCESSES from the texts of /proc/<pid>/status and cmdline; `status` ends with NUL. */
void process_put(struct writer *w, int pid, uint64_t op, const char *status, const char *argv, size_t argv_size);

/* tree_format.c, pure */
uint8_t entry_kind(mode_t mode);
void entry_put(struct writer *w, const char *path, uint8_t kind, const struct stat *st, const char *target);
/* Bytes taken; 0: incomplete; -1: malformed. */
long entry_parse(const uint8_t *data, size_t size, struct entry *out);
/* Relative, below its root: no empty, `.` or `..` component, no NUL, no component longer than NAME_MAX. */
bool entry_path_is_safe(struct span path);
#endif
