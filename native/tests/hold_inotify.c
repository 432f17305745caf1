/* Opens inotify instances until the kernel refuses, prints how many, and holds them until it is killed. */
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/resource.h>
#include <unistd.h>

int main(void) {
    struct rlimit files;
    int count = 0;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    while (inotify_init1(IN_CLOEXEC) >= 0)
        count++;
    printf("%d\n", count);
    fflush(stdout);
    pause();
    return 0;
}
