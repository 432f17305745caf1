/* The way from the guest to a program. A plain fork, not vfork: a vfork child shares the guest's memory and suspends
 * the guest, and the user whom it already became could stop it there for ever. */
#include "sessions.h"
#include "no_clone3.h"
#include "paths.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STATUS_FD 3
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static struct rlimit files;
static bool clone3_works;

void spawn_init(void) {
    /* Arguments of no size are EINVAL wherever the call is let through. */
    clone3_works = syscall(SYS_clone3, NULL, 0) < 0 && errno == EINVAL;
    if (getrlimit(RLIMIT_NOFILE, &files))
        return;
    struct rlimit all = {files.rlim_max, files.rlim_max};
    setrlimit(RLIMIT_NOFILE, &all);
}

const char *spawn_step_name(int32_t step) {
    static const char *const names[] = {"", "user", "cwd", "exec", "cgroup", "nofile", "seccomp"};
    return step >= STEP_USER && step <= STEP_FILTER ? names[step] : "exec";
}

static _Noreturn void fail(const struct spawn_plan *plan, int32_t step, int error) {
    struct spawn_failure failure = {step, error};
    if (write(plan->status, &failure, sizeof failure) < 0)
        _exit(126);
    _exit(127);
}

static int limit_files(uint32_t wanted) {
    struct rlimit limit = files;
    if (wanted)
        limit.rlim_cur = limit.rlim_max = wanted < files.rlim_max ? wanted : files.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) ? errno : 0;
}

static const char *variable(char *const *env, const char *name) {
    size_t size = strlen(name);
    for (; *env; env++)
        if (!strncmp(*env, name, size) && (*env)[size] == '=')
            return *env + size + 1;
    return NULL;
}

static void add(char **env, uint32_t *count, const char *name, const char *value) {
    size_t size = strlen(name) + strlen(value) + 2;
    char *line = *value && !variable(env, name) ? malloc(size) : NULL;
    if (!line)
        return;
    snprintf(line, size, "%s=%s", name, value);
    env[(*count)++] = line;
    env[*count] = NULL;
}

static char **environment(const struct spawn_plan *plan) {
    uint32_t count = plan->request->envc;
    char **env = malloc((count + 4) * sizeof *env);
    if (!env)
        return plan->request->env;
    memcpy(env, plan->request->env, (count + 1) * sizeof *env);
    add(env, &count, "HOME", plan->account->home);
    add(env, &count, "USER", plan->account->name);
    add(env, &count, "LOGNAME", plan->account->name);
    return env;
}

/* execvp's search without its fallback to a shell; the errno. */
static int search(char **argv, char **env) {
    char path[PATH_MAX];
    int error = ENOENT;
    const char *list = variable(env, "PATH"), *name = argv[0];
    if (!*name)
        return ENOENT;
    if (strchr(name, '/')) {
        execve(name, argv, env);
        return errno;
    }
    for (list = list ? list : DEFAULT_PATH;; list++) {
        int size = (int)strcspn(list, ":");
        int n = snprintf(path, sizeof path, "%.*s%s%s", size, list, size ? "/" : "./", name);
        if (n > 0 && (size_t)n < sizeof path)
            execve(path, argv, env);
        if (errno == EACCES)
            error = EACCES;
        else if (errno != ENOENT && errno != ENOTDIR)
            return errno;
        list += size;
        if (!*list)
            return error;
    }
}

static void redirect(const struct spawn_plan *plan) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    umask(022);
    if (plan->in >= 0)
        dup2(plan->in, 0);
    dup2(plan->out, 1);
    dup2(plan->err, 2);
    signal(SIGPIPE, SIG_DFL);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* close_range is newer than the oldest kernels; nothing lies above the limit that spawn_init raised. */
static int close_above(int last) {
    if (syscall(SYS_close_range, last + 1, ~0u, 0) == 0)
        return 0;
    if (errno != ENOSYS)
        return -1;
    for (rlim_t fd = (rlim_t)last + 1; fd < files.rlim_max; fd++)
        close((int)fd);
    return 0;
}

/* CLOEXEC acts only at the exec: until then /proc/self/fd/N in a path of the sandbox's names what the guest holds, its
 * cgroup directory on the host's mounts among it. So nothing but stdio and the status pipe is left. */
static int let_go(struct spawn_plan *plan) {
    if (plan->status != STATUS_FD && dup3(plan->status, STATUS_FD, O_CLOEXEC) < 0)
        return -1;
    plan->status = STATUS_FD;
    return close_above(STATUS_FD);
}

static int enter(const char *path) {
    int fd = open_path(AT_FDCWD, path, O_PATH | O_DIRECTORY, 0);
    int error = fd < 0 || fchdir(fd) ? errno : 0;
    if (fd >= 0)
        close(fd);
    return error;
}

static _Noreturn void child(struct spawn_plan *plan) {
    int error;
    redirect(plan);
    if (clone3_works && forbid_clone3())
        fail(plan, STEP_FILTER, errno);
    if (!clone3_works && plan->group && write(plan->group->procs, "0", 1) != 1)
        fail(plan, STEP_CGROUP, errno);
    if (let_go(plan))
        fail(plan, STEP_LIMIT, errno);
    if ((error = identity_become(&plan->account->who)))
        fail(plan, STEP_USER, error);
    if ((error = enter(plan->request->path)))
        fail(plan, STEP_CWD, error);
    if ((error = limit_files(plan->request->nofile)))
        fail(plan, STEP_LIMIT, error);
    fail(plan, STEP_EXEC, search(plan->request->argv, environment(plan)));
}

/* Being born in a group costs nothing; moving there later waits for an RCU grace period whenever the last move was some
 * time ago (measured: 8-16 ms after a pause of 20 ms). cgroup.threads takes nothing from another group's process. */
static int clone_into(const struct group *group) {
    struct clone_args args = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)group->dir};
    return (int)syscall(SYS_clone3, &args, sizeof args);
}

int spawn(struct spawn_plan *plan) {
    int pid = plan->group && clone3_works ? clone_into(plan->group) : fork();
    if (pid == 0)
        child(plan);
    return pid;
}
