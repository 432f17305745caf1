/* A guest for the spawner's tests: per connection one request "uid\0argv0\0argv1\0…" up to end-of-file; runs it with its
 * output on the connection, then writes "\n#exit N\n". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void drop_inherited(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    syscall(SYS_capget, &head, data);
    data[0].inheritable = data[1].inheritable = 0;
    syscall(SYS_capset, &head, data);
}

static void run(int connection, char *request, size_t size) {
    char *arguments[64];
    size_t count = 0;
    uid_t uid = (uid_t)atoi(request);
    for (char *next = request + strlen(request) + 1; next < request + size && count < 63; next += strlen(next) + 1)
        arguments[count++] = next;
    arguments[count] = NULL;
    drop_inherited();
    if (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid))
        _exit(125);
    dup2(connection, 1);
    dup2(connection, 2);
    setsid();
    execvp(arguments[0], arguments);
    perror(arguments[0]);
    _exit(127);
}

static void serve(int connection) {
    static char request[65536];
    size_t size = 0;
    for (ssize_t got; (got = read(connection, request + size, sizeof request - 1 - size)) > 0;)
        size += (size_t)got;
    request[size] = 0;
    pid_t pid = size ? fork() : -1;
    if (pid == 0)
        run(connection, request, size);
    int status = 0;
    if (pid > 0)
        waitpid(pid, &status, 0);
    dprintf(connection, "\n#exit %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
}

int main(void) {
    fcntl(3, F_SETFD, FD_CLOEXEC);
    fcntl(4, F_SETFD, FD_CLOEXEC);
    for (;;) {
        int connection = accept4(3, NULL, NULL, SOCK_CLOEXEC);
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
        if (connection < 0)
            continue;
        serve(connection);
        close(connection);
    }
}
