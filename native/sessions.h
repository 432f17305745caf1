/* Programs: what the child does between fork and exec, and what the guest keeps about a running one. */
#ifndef BARCHAN_SESSIONS_H
#define BARCHAN_SESSIONS_H
#include "groups.h"
#include "identity.h"
#include "requests.h"

enum spawn_step { STEP_USER = 1, STEP_CWD, STEP_EXEC, STEP_FORK, STEP_CGROUP, STEP_LIMIT };

struct spawn_failure {
    int32_t step, error;
};

struct spawn_plan {
    const struct request *request;
    const struct account *account;
    const struct group *group; /* may be NULL */
    int in, out, err, status;  /* in: -1 leaves /dev/null */
};

/* Remembers what programs are to get back: the limit on open files that the guest was started with. */
void spawn_init(void);
/* The pid, or -1 with errno. A child that fails before exec writes a spawn_failure to `status`; end of file there means it runs. */
int spawn(const struct spawn_plan *plan);
const char *spawn_step_name(int32_t step);
#endif
