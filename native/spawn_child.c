/* The way from the guest to a program. A plain fork, not vfork: a vfork child shares the guest's memory and suspends
 * the guest, and the user whom it already became could stop it there for ever. */
#include "sessions.h"
#include "no_clone3.h"
#include "paths.h"
#include "shell.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
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
    static const char *const names[] = {"", "user", "cwd", "exec", "cgroup", "nofile", "seccomp", "tty"};
    return step >= STEP_USER && step <= STEP_TERMINAL ? names[step] : "exec";
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
static int close_between(int first, int last) {
    if (syscall(SYS_close_range, first, (unsigned)last, 0) == 0)
        return 0;
    if (errno != ENOSYS)
        return -1;
    for (int fd = first; fd <= last && (rlim_t)fd < files.rlim_max; fd++)
        close(fd);
    return 0;
}

/* In two moves: either may lie where the other goes. */
static int place_control(struct spawn_plan *plan) {
    int commands = fcntl(plan->commands, F_DUPFD_CLOEXEC, SHELL_REPORTS_FD + 1);
    int reports = fcntl(plan->reports, F_DUPFD_CLOEXEC, SHELL_REPORTS_FD + 1);
    return commands < 0 || reports < 0 || dup2(commands, SHELL_COMMANDS_FD) < 0 || dup2(reports, SHELL_REPORTS_FD) < 0;
}

/* CLOEXEC acts only at the exec: until then /proc/self/fd/N in a path of the sandbox's names what the guest holds, its
 * cgroup directory on the host's mounts among it. So nothing but stdio, the status pipe and a shell's control is left. */
static int let_go(struct spawn_plan *plan) {
    if (plan->status != STATUS_FD && dup3(plan->status, STATUS_FD, O_CLOEXEC) < 0)
        return -1;
    plan->status = STATUS_FD;
    if (plan->commands < 0)
        return close_between(STATUS_FD + 1, INT_MAX);
    return place_control(plan) || close_between(STATUS_FD + 1, SHELL_COMMANDS_FD - 1) || close_between(SHELL_REPORTS_FD + 1, INT_MAX);
}

static int enter(const char *path) {
    int fd = open_path(AT_FDCWD, path, O_PATH | O_DIRECTORY, 0);
    int error = fd < 0 || fchdir(fd) ? errno : 0;
    if (fd >= 0)
        close(fd);
    return error;
}

/* The shell that was asked for, or bash, or sh; the errno. */
static int start_shell(const struct request *request, char **env) {
    char **argv = malloc((request->argc + 4) * sizeof *argv);
    uint32_t count = request->argc;
    if (!argv)
        return ENOMEM;
    memcpy(argv, request->argv, count * sizeof *argv);
    count += !count;
    argv[count++] = "-c";
    argv[count++] = (char *)(uintptr_t)shell_driver;
    argv[count] = NULL;
    if (request->argc)
        return search(argv, env);
    argv[0] = "bash";
    execve("/bin/bash", argv, env);
    argv[0] = "sh";
    execve("/bin/sh", argv, env);
    return errno;
}

static _Noreturn void child(struct spawn_plan *plan) {
    int error;
    redirect(plan);
    if (plan->terminal && ioctl(0, TIOCSCTTY, 0))
        fail(plan, STEP_TERMINAL, errno);
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
    char **env = environment(plan);
    fail(plan, STEP_EXEC, plan->commands < 0 ? search(plan->request->argv, env) : start_shell(plan->request, env));
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
