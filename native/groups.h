/* One cgroup v2 directory per program that the host started, below the sandbox's own: what ends or counts all its
 * descendants whatever they did with sessions and parents. Without a cgroup descriptor there are no groups. */
#ifndef BARCHAN_GROUPS_H
#define BARCHAN_GROUPS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GROUP_NAME "x%u" /* of a group's number: counted from 0 */
#define GROUPS_KEPT 4u   /* at most so many empty ones wait for the next program */

struct group {
    int dir, procs; /* procs: cgroup.procs, for reading and writing */
    uint32_t number;
    uint64_t op; /* who it was last given to */
    bool killed;
    struct group *next;
};

/* `fd` is the sandbox's directory; false if it is none. */
bool groups_init(int fd);
bool groups_available(void);
/* An empty group; NULL with errno. */
struct group *group_take(uint64_t op);
/* The operation ended. What still runs in the group lives on; it is used again or removed when empty. */
void group_give(struct group *group);
/* False: the kernel was not told; the caller may signal what group_pids names. */
bool group_kill(struct group *group);
bool group_alive(const struct group *group);
/* Calls `each` with every pid; how many there were, -1 if the group cannot be read. */
int group_pids(const struct group *group, void (*each)(int pid, void *context), void *context);
/* Looks for groups that became empty after their operation ended. */
void groups_sweep(void);
/* The groups with an operation, one after another; NULL starts. */
const struct group *groups_next(const struct group *after);

/* process_format.c, pure: calls `each`, unless NULL, for the pids of a cgroup.procs file, which may come in pieces:
 * `partial` is 0 at first. Its lines. */
uint32_t pids_parse(const char *text, size_t size, uint32_t *partial, void (*each)(int pid, void *context), void *context);
/* The parent's pid from the text of /proc/<pid>/stat, 0 if it is none. `forked`: it has not become another program yet. */
int parent_parse(const char *text, bool *forked);
#endif
