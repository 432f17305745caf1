/* Run in a sandbox: hold_locks COUNT [shared|open] takes that many locks on bytes of files, says "held" and keeps them until
 * it is ended. shared: by a process that ends, its descriptors shared with one that stays. open: locks of the open file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int command = F_SETLK;
static long count;
static char stack[65536];

/* Few per file: each is compared with all that its file has. */
static int take(void *unused) {
    (void)unused;
    int fd = -1;
    for (long i = 0; i < count; i++) {
        if (i % 500 == 0)
            fd = open("/tmp", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2 * (i % 500), .l_len = 1};
        if (fcntl(fd, command, &lock)) {
            perror("lock");
            return 1;
        }
    }
    return 0;
}

int main(int arguments, char **argument) {
    if (arguments < 2)
        return 2;
    const char *how = arguments > 2 ? argument[2] : "";
    int status = 0;
    count = atol(argument[1]);
    if (!strcmp(how, "open"))
        command = F_OFD_SETLK;
    if (!strcmp(how, "shared"))
        waitpid(clone(take, stack + sizeof stack, CLONE_FILES | SIGCHLD, NULL), &status, 0);
    else
        status = take(NULL);
    puts(status ? "failed" : "held");
    fflush(stdout);
    pause();
    return 0;
}
